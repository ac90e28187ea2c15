// The page: what is typed in and pressed, and what is shown then.

import { align } from "./alignment.js";
import { fillCard, placeCard } from "./card.js";
import { continuationsOf, continuationsTable, preference, scoreContinuations } from "./continuations.js";
import { element, row } from "./dom.js";
import { countBytes, formatCount, formatNumber, textFigures } from "./figures.js";
import { legend } from "./legend.js";
import { shortNames } from "./names.js";
import { SAMPLES } from "./samples.js";
import { Server, ShownError, serverUrl } from "./server.js";
import { asCsv, asJson, copy, linked, linkTo } from "./sharing.js";
import { TokenView } from "./tokens.js";
import { scoreInWindows, slidingWindows } from "./windows.js";

const OWN_BASE = new URL(".", document.baseURI).href;
/* The URL below which this server's routes are. Servers below other paths share its origin, and so its storage. */

const at = (id) => document.getElementById(id);

const MOST_ADDED_TOKENS = 8;
/* That a tokenizer puts before and after a text. A text of fewer bytes than the context has tokens fits into it. */

let shown = null;
/* What is scored and shown: text, pieces, windows if it was scored in any, and of each server its result and model. */

let compared = null;
/* What continuations are shown of, as `askedOf` has it. */

let wanted = "surprise";
/* What to color by. A difference waits until there is one. */

let asking = new AbortController();
let scoring = new AbortController();
let comparing = new AbortController();

const view = new TokenView(at("tokens"), (index) => {
  at("card").hidden = index === null;
  if (index === null) return;
  fillCard(at("card"), index, view.tokensOfCharacter(index), shown.pieces, shortNames(shown.models), shown.results);
  placeCard(at("card"), view.chosenElement, at("tokens"));
});

function firstServer() {
  return new Server("This server", OWN_BASE, at("key").value);
}

/** The second server, or null where none is typed in. */
function secondServer() {
  const typed = at("second-url").value.trim();
  return typed ? new Server("The second server", serverUrl(typed), at("second-key").value) : null;
}

/** What is asked of the servers: what is shown of anything else is stale. */
function askedOf(...ids) {
  return JSON.stringify(["second-url", ...ids].map((id) => [at(id).value, at(id).checked]));
}

const SCORED_OF = ["text"];
const COMPARED_OF = ["text", "continuations", "space"];

function showStaleness() {
  const staleness = {
    "scored-stale": shown !== null && shown.asked !== askedOf(...SCORED_OF),
    "answers-stale": compared !== null && compared !== askedOf(...COMPARED_OF),
  };
  for (const [id, isStale] of Object.entries(staleness)) {
    at(id).hidden = !isStale;
    at(id).parentElement.classList.toggle("stale", isStale);
  }
}

/** Short names of models for a table, with the whole one for a pointer at rest. */
function headings(models) {
  return shortNames(models).map((name, index) => element("span", { title: models[index] }, name));
}

async function showServed() {
  asking.abort();
  asking = new AbortController();
  try {
    const info = await firstServer().info(asking.signal);
    at("alternatives").max = info.max_top_logprobs;
    at("alternatives").value = Math.min(at("alternatives").value, info.max_top_logprobs);
    at("served").title = info.model;
    const parts = [...shortNames([info.model]), `context ${formatCount(info.max_model_len)}`, info.dtype, info.quantization];
    at("served").textContent = parts.filter(Boolean).join(" · ");
    at("key").removeAttribute("aria-invalid");
  } catch (error) {
    if (error.name === "AbortError") return;
    at("served").textContent = error.message;
    pointToKey(error);
  }
}

/** Show where the key is typed in, if it was the key that was wrong. */
function pointToKey(error) {
  if (error.status !== 401) return;
  at("servers").open = true;
  if (!error.message.startsWith("The second server")) at("key").setAttribute("aria-invalid", "true");
}

/** Run something that the servers are asked for; a failure is shown in the element `place`. */
async function orShowError(place, ask) {
  place.textContent = "";
  try {
    await ask();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ShownError)) throw error;
    place.textContent = error.message;
    pointToKey(error);
  }
}

async function scoreText() {
  scoring.abort();
  scoring = new AbortController();
  const { signal } = scoring;
  at("score-status").textContent = "Scoring …";
  showStaleness();
  try {
    await orShowError(at("score-error"), () => scoreOnServers(signal));
  } finally {
    if (!signal.aborted) endProgress();
  }
}

function endProgress() {
  at("score-status").textContent = "";
  at("progress").hidden = at("stop").hidden = true;
  showStaleness();
}

async function scoreOnServers(signal) {
  const [text, asked] = [at("text").value, askedOf(...SCORED_OF)];
  if (!text) throw new ShownError("There is no text to score: paste one, or pick a sample.");
  const k = Math.max(0, Math.min(at("alternatives").valueAsNumber || 0, at("alternatives").max));
  const options = { return_tokens: true, return_ranks: true, top_logprobs: k };
  const [first, second] = [firstServer(), secondServer()];
  const { tokens, windows } = await windowsOf(text, first, signal);
  const score = windows ? progressOf(windows, second ? 2 : 1) : null;
  const ask = async (server) => {
    if (windows) return scoreInWindows(server, tokens, windows, options, signal, score);
    const answer = await server.score({ prompt: text, ...options }, signal);
    if (server === first) performance.mark("scoremode-answer");
    return server.scoresOfTokens(answer);
  };
  const secondAnswer = second && ask(second);
  // Awaited below, unless the first one fails.
  secondAnswer?.catch(() => {});
  const answer = await ask(first);
  showScored(text, asked, windows, answer);
  if (!windows) measureColors();
  if (second) showComparison(await secondAnswer);
}

/** The tokens of a text and the windows to score them in; none where it fits into the server's context. */
async function windowsOf(text, server, signal) {
  const { max_model_len: context } = await server.info(signal);
  if (countBytes(text) + MOST_ADDED_TOKENS <= context) return {};
  const tokens = await server.tokenize(text, signal);
  return tokens.length <= context ? {} : { tokens, windows: slidingWindows(tokens.length, context) };
}

/** Show how many windows are scored, on all servers; returns what is to be called after each. */
function progressOf(windows, numServers) {
  const [count, size] = [windows.list.length, formatCount(windows.context)];
  at("score-status").textContent = `Scoring ${formatCount(count)} windows of ${size} tokens …`;
  at("progress").hidden = at("stop").hidden = false;
  at("progress").max = count * numServers;
  at("progress").value = 0;
  return () => (at("progress").value += 1);
}

/** How long it took from the first server's answer until colors were painted, as a measure of the performance API. */
function measureColors() {
  requestAnimationFrame(() => setTimeout(() => performance.measure("scoremode-colors", "scoremode-answer")));
}

function showScored(text, asked, windows, answer) {
  const [result] = answer.data;
  shown = { text, asked, windows, pieces: align(text, result.tokens), results: [result], models: [answer.model] };
  at("scored").hidden = false;
  at("copied").textContent = "";
  view.draw(shown.pieces, shown.results, mode());
  at("first-token").hidden = result.logprobs[0] !== null;
  showFiguresAndLegend();
}

/** Add the second server's answer to what is shown; tokens that are not the same cannot be compared. */
function showComparison(answer) {
  const [result] = answer.data;
  const [first] = shown.results;
  const isSame = (name) => first[name].length === result[name].length && first[name].every((each, i) => each === result[name][i]);
  if (!isSame("token_ids") || !isSame("tokens")) {
    throw new ShownError(
      "The second server cuts the text into other tokens, so there is no difference token by token to show: " +
        `${formatCount(result.tokens.length)} of ${answer.model}, ${formatCount(first.tokens.length)} of ${shown.models[0]}.`,
    );
  }
  shown.results.push(result);
  shown.models.push(answer.model);
  view.paint(shown.results, mode());
  showFiguresAndLegend();
}

/** What tokens are colored by. */
function mode() {
  return wanted === "difference" && shown.results.length < 2 ? "surprise" : wanted;
}

function chooseMode(chosen) {
  wanted = chosen;
  if (!shown) return;
  view.paint(shown.results, mode());
  showLegend();
  if (linked().text !== null) history.replaceState(null, "", linkTo(linked().text, mode()));
}

/** The legend, and the choice that is shown: a difference that is not there cannot be chosen. */
function showLegend() {
  at("legend").replaceChildren(...legend(mode(), shown.results[0]));
  for (const each of document.querySelectorAll("input[name=mode]")) each.checked = each.value === mode();
  document.querySelector("input[value=difference]").disabled = shown.results.length < 2;
}

function showFiguresAndLegend() {
  showLegend();
  const figures = shown.results.map((result) => textFigures(result, shown.text));
  const rows = [
    row("Sum of logprobs (nats)", figures.map((each) => formatNumber(each.sumLogprob))),
    row("Perplexity", figures.map((each) => formatNumber(each.perplexity))),
    row("Bits per byte", figures.map((each) => formatNumber(each.bitsPerByte, 4))),
    row("Tokens scored", figures.map((each) => `${formatCount(each.scored)} of ${formatCount(each.tokens)}`)),
  ];
  if (shown.windows) {
    const { list, context, stride } = shown.windows;
    const words = `${formatCount(list.length)} of ${formatCount(context)}, stride ${formatCount(stride)}`;
    rows.push(row("Windows", [words]));
    rows.at(-1).cells[1].colSpan = figures.length;
  }
  const head = element("thead", {}, row("", headings(shown.models), "th"));
  at("figures").replaceChildren(head, element("tbody", {}, ...rows));
}

async function compareContinuations() {
  comparing.abort();
  comparing = new AbortController();
  const { signal } = comparing;
  at("answers").hidden = true;
  compared = null;
  at("preferred").textContent = "Scoring …";
  try {
    await orShowError(at("compare-error"), async () => {
      const [prompt, asked] = [at("text").value, askedOf(...COMPARED_OF)];
      if (!prompt) throw new ShownError("There is no text to continue: paste one, or pick a sample.");
      const continuations = continuationsOf(at("continuations").value, prompt, at("space").checked);
      const servers = [firstServer(), secondServer()].filter(Boolean);
      const asking = servers.map((server) => scoreContinuations(server, prompt, continuations, signal));
      const answers = await Promise.allSettled(asking);
      const answered = answers.filter((each) => each.status === "fulfilled").map((each) => each.value);
      if (!signal.aborted && answered.length) showAnswers(asked, continuations, answered);
      for (const each of answers) if (each.status === "rejected") throw each.reason;
    });
  } finally {
    if (!signal.aborted && at("answers").hidden) at("preferred").textContent = "";
    showStaleness();
  }
}

function showAnswers(asked, continuations, answers) {
  const names = answers.length > 1 ? shortNames(answers.map((each) => each.model)) : [null];
  const tables = answers.map(({ figures }, index) => continuationsTable(names[index], continuations, figures));
  at("answers").replaceChildren(...tables);
  const sentences = answers.map(({ figures }, index) => preference(names[index], continuations, figures));
  at("preferred").textContent = sentences.join(" ");
  at("answers").hidden = false;
  compared = asked;
}

/** Have a text copied, and say so or why not. */
async function share(what, makeText) {
  at("copied").textContent = "";
  await orShowError(at("copied"), () => copy(makeText()));
  at("copied").textContent ||= `Copied ${what}.`;
}

/** The link is shown in the address bar too, where it can be copied by hand. */
function link() {
  const url = linkTo(shown.text, mode());
  history.replaceState(null, "", url);
  return url;
}

/** Score the text that the page's URL has, if it has one. */
function openLink() {
  const { text, mode: chosen } = linked();
  if (chosen) chooseMode(chosen);
  if (text === null) return;
  at("text").value = text;
  scoreText();
}

function offerSamples() {
  at("sample").append(...Object.keys(SAMPLES).map((name) => element("option", {}, name)));
  at("sample").addEventListener("change", () => {
    const text = SAMPLES[at("sample").value];
    if (text) at("text").value = text;
    showStaleness();
  });
}

/** Show the difference once a second server is named; without one there is none. */
function offerDifference() {
  const isTyped = Boolean(at("second-url").value.trim());
  // Ranks that were chosen stay.
  if (wanted !== "rank") chooseMode(isTyped ? "difference" : "surprise");
  showStaleness();
}

function keptKey(base) {
  return sessionStorage.getItem(`scoremode-key ${base}`);
}

function keepKey(base, key) {
  sessionStorage.setItem(`scoremode-key ${base}`, key);
}

/** The URL of the second server, or null where there is none that could be asked. */
function secondBase() {
  try {
    return serverUrl(at("second-url").value.trim());
  } catch {
    return null;
  }
}

/** Keys and the second server's URL stay in this tab, each key under the URL of the server that it was typed for. */
function keepForThisTab() {
  const secondUrl = `scoremode-second-url ${OWN_BASE}`;
  at("key").value = keptKey(OWN_BASE) ?? "";
  at("key").addEventListener("input", () => keepKey(OWN_BASE, at("key").value));
  at("second-url").value = sessionStorage.getItem(secondUrl) ?? "";
  at("second-url").addEventListener("input", () => sessionStorage.setItem(secondUrl, at("second-url").value));
  let base = secondBase();
  at("second-key").value = keptKey(base) ?? "";
  at("second-key").addEventListener("input", () => base && keepKey(base, at("second-key").value));
  at("second-url").addEventListener("change", () => {
    // A key that was typed in before any URL is for the first one.
    const typed = base ? "" : at("second-key").value;
    base = secondBase();
    at("second-key").value = keptKey(base) ?? typed;
    if (base && typed) keepKey(base, at("second-key").value);
  });
  at("servers").open = Boolean(at("second-url").value);
}

function onCtrlEnter(id, act) {
  at(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act();
  });
}

offerSamples();
keepForThisTab();
offerDifference();
at("second-url").addEventListener("change", offerDifference);
at("origin").textContent = location.origin;
at("score").addEventListener("click", scoreText);
at("compare").addEventListener("click", compareContinuations);
onCtrlEnter("text", scoreText);
onCtrlEnter("continuations", compareContinuations);
at("key").addEventListener("change", showServed);
at("stop").addEventListener("click", () => {
  scoring.abort();
  endProgress();
});
at("copy-link").addEventListener("click", () => share("the link", link));
at("copy-json").addEventListener("click", () => share("the JSON", () => asJson(shown)));
at("copy-csv").addEventListener("click", () => share("the CSV", () => asCsv(shown)));
for (const id of ["text", "continuations", "space", "second-url"]) at(id).addEventListener("input", showStaleness);
for (const each of document.querySelectorAll("input[name=mode]")) {
  each.addEventListener("change", () => chooseMode(each.value));
}
const followToken = () => view.chosenElement && placeCard(at("card"), view.chosenElement, at("tokens"));
addEventListener("scroll", followToken, { capture: true, passive: true });
addEventListener("resize", followToken);
addEventListener("hashchange", openLink);
await showServed();
openLink();
