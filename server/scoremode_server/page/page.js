// The page: what is typed in and pressed, and what is shown then.

import { align } from "./alignment.js";
import { fillCard, placeCard } from "./card.js";
import { continuationsOf, scoreContinuations, showPreference } from "./continuations.js";
import { element, row } from "./dom.js";
import { formatCount, formatNumber, textFigures } from "./figures.js";
import { legend } from "./legend.js";
import { SAMPLES } from "./samples.js";
import { Server, ShownError, serverUrl } from "./server.js";
import { TokenView } from "./tokens.js";

const OWN_BASE = new URL(".", document.baseURI).href;
/* The URL below which this server's routes are. Servers below other paths share its origin, and so its storage. */

const at = (id) => document.getElementById(id);

let shown = null;
/* What is scored and shown: text, pieces, results and the names of their servers. */

let asking = new AbortController();
let scoring = new AbortController();
let comparing = new AbortController();

const view = new TokenView(at("tokens"), (index) => {
  at("card").hidden = index === null;
  if (index === null) return;
  fillCard(at("card"), index, view.tokensOfCharacter(index), shown.pieces, shown.names, shown.results);
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

async function showServed() {
  asking.abort();
  asking = new AbortController();
  try {
    const info = await firstServer().info(asking.signal);
    at("alternatives").max = info.max_top_logprobs;
    at("alternatives").value = Math.min(at("alternatives").value, info.max_top_logprobs);
    const parts = [info.model, `context ${formatCount(info.max_model_len)}`, info.dtype, info.quantization];
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
  try {
    await orShowError(at("score-error"), () => scoreOnServers(signal));
  } finally {
    if (!signal.aborted) at("score-status").textContent = "";
  }
}

async function scoreOnServers(signal) {
  const text = at("text").value;
  const k = Math.max(0, Math.min(at("alternatives").valueAsNumber || 0, at("alternatives").max));
  const body = { prompt: text, return_tokens: true, return_ranks: true, top_logprobs: k };
  const second = secondServer();
  const secondAnswer = second?.score(body, signal);
  // It is waited for below, unless the first one fails.
  secondAnswer?.catch(() => {});
  const first = firstServer();
  const answer = await first.score(body, signal);
  performance.mark("scoremode-answer");
  showScored(text, first.scoresOfTokens(answer));
  measureColours();
  if (second) showComparison(second.scoresOfTokens(await secondAnswer));
}

/** How long it took from the first server's answer until colours were painted, as a measure of the performance API. */
function measureColours() {
  requestAnimationFrame(() => setTimeout(() => performance.measure("scoremode-colours", "scoremode-answer")));
}

function showScored(text, answer) {
  const [result] = answer.data;
  shown = { text, pieces: align(text, result.tokens), results: [result], names: [answer.model] };
  at("scored").hidden = false;
  view.draw(shown.pieces, shown.results, mode());
  const isFirstUnscored = result.logprobs[0] === null;
  at("first-token").textContent = isFirstUnscored
    ? "The first token has no context, so it has no logprob and no colour."
    : "";
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
        `${formatCount(result.tokens.length)} of ${answer.model}, ${formatCount(first.tokens.length)} of ${shown.names[0]}.`,
    );
  }
  shown.results.push(result);
  shown.names.push(answer.model === shown.names[0] ? `${answer.model} (second server)` : answer.model);
  view.paint(shown.results, mode());
  showFiguresAndLegend();
}

/** What tokens are coloured by. A difference that is chosen waits until there is one. */
function mode() {
  const chosen = document.querySelector("input[name=mode]:checked").value;
  return chosen === "difference" && shown.results.length < 2 ? "surprise" : chosen;
}

function chooseMode() {
  view.paint(shown.results, mode());
  showLegend();
}

function showLegend() {
  at("legend").replaceChildren(...legend(mode(), shown.results[0]));
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
  const head = element("thead", {}, row("", shown.names, "th"));
  at("figures").replaceChildren(head, element("tbody", {}, ...rows));
}

async function compareContinuations() {
  comparing.abort();
  comparing = new AbortController();
  const { signal } = comparing;
  at("answers").hidden = true;
  at("preferred").textContent = "Scoring …";
  try {
    await orShowError(at("compare-error"), async () => {
      const prompt = at("text").value;
      const continuations = continuationsOf(at("continuations").value, prompt, at("space").checked);
      const figures = await scoreContinuations(firstServer(), prompt, continuations, signal);
      at("preferred").textContent = showPreference(at("answers"), continuations, figures);
      at("answers").hidden = false;
    });
  } finally {
    if (!signal.aborted && at("answers").hidden) at("preferred").textContent = "";
  }
}

function offerSamples() {
  at("sample").append(...Object.keys(SAMPLES).map((name) => element("option", {}, name)));
  at("sample").addEventListener("change", () => {
    const text = SAMPLES[at("sample").value];
    if (text) at("text").value = text;
  });
}

/** There is a difference to choose where there is a second server, and whoever adds one wants to see it. */
function offerDifference() {
  const before = shown && mode();
  const difference = document.querySelector("input[value=difference]");
  const surprise = document.querySelector("input[value=surprise]");
  difference.disabled = !at("second-url").value.trim();
  (difference.disabled ? surprise : difference).checked = true;
  if (shown && mode() !== before) chooseMode();
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
for (const each of document.querySelectorAll("input[name=mode]")) each.addEventListener("change", chooseMode);
const followToken = () => view.chosenElement && placeCard(at("card"), view.chosenElement, at("tokens"));
addEventListener("scroll", followToken, { capture: true, passive: true });
addEventListener("resize", followToken);
await showServed();
