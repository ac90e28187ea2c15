"use strict";

// Values that begin a new color, in nats, where colors are the same in every report, so that pictures of two compare.
const DIFFERENCE_STEPS = [-1, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1];
// Shares of the tokens below each step, where colors are fitted; of differences, by their size.
const SHARES = [0.2, 0.4, 0.6, 0.75, 0.87, 0.94, 0.98, 0.995];
const DIFFERENCE_SHARES = [0.5, 0.8, 0.95, 0.99];
const MOST_SORTED = 50_000;
// Line breaks in a row, with nothing but blanks between them.
const BREAKS = /\n(?:[ \t\r]*\n)*/g;
const TOKENS_AT_ONCE = 6000;
const MOST_CELLS = 240;
const NUM_TOP = 50;
const NUM_AROUND = 8;

const MEASURES = {
  nll: { name: "surprise (NLL)", of: "nll", steps: [0.1, 0.5, 1, 2, 3, 5, 7, 10] },
  kld: { name: "KL divergence from the reference", of: "kld", steps: [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1] },
  nll_difference: { name: "difference of NLL", of: "nll", difference: true, steps: DIFFERENCE_STEPS },
  kld_difference: { name: "difference of KL divergence", of: "kld", difference: true, steps: DIFFERENCE_STEPS },
};

const isNarrow = matchMedia("(max-width: 60rem)");
const byId = (id) => document.getElementById(id);

// Children are elements or texts.
function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// A label that may be broken after its hyphens.
function named(label) {
  return element("span", "", ...label.split(/(?<=-)/).flatMap((part) => [part, element("wbr")]));
}

// --- Tables ---

function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    header.firstElementChild.addEventListener("click", () => {
      const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", direction);
      sortRows(table.tBodies[0], column, header.classList.contains("number"), direction === "ascending" ? 1 : -1);
    });
  });
}

function sortRows(body, column, isNumber, sign) {
  const compare = (...rows) => {
    const [a, b] = rows.map((row) => row.cells[column].dataset.value);
    // What is not known comes last in both directions.
    if (a === "" || b === "") return (a === "") - (b === "");
    // Infinity less infinity is not a number.
    return a === b ? 0 : sign * (isNumber ? Number(a) - Number(b) : a.localeCompare(b));
  };
  body.append(...[...body.rows].sort(compare));
}

// Of cells; the first of each row is its heading.
function makeTable(className, headings, rows) {
  const lines = rows.map((cells) => element("tr", "", ...cells));
  for (const line of lines) line.firstElementChild.scope = "row";
  const head = element("thead", "", element("tr", "", ...headings));
  return element("table", className, head, element("tbody", "", ...lines));
}

// --- Data ---

const ARRAYS = { uint16: Uint16Array, int32: Int32Array, float16: Float16Array, float32: Float32Array };

function unpack({ type, scale, data: content }) {
  const values = new ARRAYS[type](Uint8Array.fromBase64(content).buffer);
  if (scale === null) return values;
  return Float32Array.from(values, (value) => (type === "uint16" && value === 65535 ? Infinity : value * scale));
}

// Arrays are unpacked when they are first asked for.
function lazy(packed) {
  return new Proxy(packed, {
    get(_, name) {
      if (packed[name]?.data !== undefined) packed[name] = unpack(packed[name]);
      return packed[name];
    },
  });
}

const data = JSON.parse(byId("data").textContent);
const series = data.series.map(lazy);
const seriesPlaces = [...series.keys()];
const tokens = unpack(data.tokens);
const tokenIds = unpack(data.vocabulary.ids);
const tokenBytes = new Map(Object.entries(data.vocabulary.bytes).map(([place, hex]) => [Number(place), Uint8Array.fromHex(hex)]));
const passages = makePassages(lazy(data.passages));
const tokenClasses = data.classes === null ? [] : unpack(data.classes);

function makePassages(arrays) {
  let [start, before] = [0, 0];
  return Array.from(arrays.size, (size, index) => {
    const kept = arrays.kept[index] === 1;
    const [window, first] = [arrays.window[index], arrays.first[index]];
    const domain = arrays.domain?.[index];
    const passage = { index, size, kept, window, first, domain, start: kept ? start : -1, before };
    if (kept) start += size;
    before += size;
    return passage;
  });
}

const keptPassages = passages.filter((passage) => passage.kept);
const numTokens = passages.reduce((sum, passage) => sum + passage.size, 0);
const isCut = keptPassages.length < passages.length;
const passageOfToken = keptPassages.flatMap((passage) => Array(passage.size).fill(passage));

function windowsOf({ window }) {
  return `window ${(window + 1).toLocaleString("en")}`;
}

function textOf(place) {
  const text = data.vocabulary.texts[place];
  return text ? text : `⟨${tokenIds[place]}⟩`;
}

// Where tokens stand in one line, what would break it has a sign.
function inLine(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// A token that is a part of a character has its bytes.
function aloneText(place) {
  return tokenBytes.has(place) ? `⟨${data.vocabulary.bytes[place]}⟩` : inLine(textOf(place)).replaceAll(" ", "␣");
}

// The text that each token of a passage completes: a character whose bytes several tokens share is its last token's.
function textsOf(passage) {
  if (passage.texts) return passage.texts;
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const places = Array.from(tokens.subarray(passage.start, passage.start + passage.size));
  passage.texts = places.map((place, at) => {
    const bytes = tokenBytes.get(place);
    const isWithin = tokenBytes.has(places[at + 1]);
    return bytes ? decoder.decode(bytes, { stream: isWithin }) : textOf(place);
  });
  return passage.texts;
}

function textAt(position) {
  const passage = passageOfToken[position];
  return inLine(textsOf(passage)[position - passage.start]).replaceAll(" ", "␣") || aloneText(tokens[position]);
}

// Where in the text a passage or one of its tokens is.
function shareBefore(passage, offset = 0) {
  return `${Math.round((100 * (passage.before + offset)) / numTokens)} %`;
}

// --- What the colors show ---

const choice = { measure: "nll", first: 0, second: 0 };
let steps = [];
let meanSteps = [];

// Values of tokens, or means of passages, of one series or of the difference of two.
function valuesOf(mean = false, first = choice.first, second = choice.second) {
  const measure = MEASURES[choice.measure];
  const name = mean ? `mean_${measure.of}` : measure.of;
  const values = series[first][name];
  if (!measure.difference) return (index) => values[index];
  const others = series[second][name];
  // Infinity minus infinity counts as 0 here.
  return (index) => (values[index] === others[index] ? 0 : values[index] - others[index]);
}

function sizeOf(value) {
  return MEASURES[choice.measure].difference ? Math.abs(value) : value;
}

function chosenName() {
  const { name, difference } = MEASURES[choice.measure];
  const [first, second] = [series[choice.first].label, series[choice.second].label];
  return `${name}: ${first}${difference ? ` less ${second}` : ""}`;
}

// What is drawn in the colors: all series that the measure can be of, or the chosen ones.
function fittedSteps(mean) {
  const { difference, steps: fixed } = MEASURES[choice.measure];
  const scale = byId("scale").value;
  if (scale === "fixed") return fixed;
  let others = seriesPlaces.filter((index) => (difference ? comparable(index, choice.second) : isOffered(index)));
  // The base's own divergence is noise, which others' colors are not fitted to.
  if (!difference && others.length > 1) others = others.filter((index) => index > 0);
  const length = mean ? passages.length : tokens.length;
  const every = Math.ceil(length / MOST_SORTED);
  const sizes = [];
  for (const index of scale === "runs" ? others : [choice.first]) {
    const value = valuesOf(mean, index);
    for (let at = 0; at < length; at += every) sizes.push(sizeOf(value(at)));
  }
  // Where nothing differs there is no color, however many tokens that are.
  const sorted = Float64Array.from(sizes.filter((size) => size > 0 && size < Infinity)).sort();
  if (!sorted.length) return fixed;
  const rounded = (share) => Number(sorted[Math.floor(share * (sorted.length - 1))].toPrecision(2));
  if (!difference) return SHARES.map(rounded);
  const upper = DIFFERENCE_SHARES.map(rounded);
  return [...upper.map((step) => -step).reverse(), ...upper];
}

function colorClass(value, of = steps) {
  return (MEASURES[choice.measure].difference ? "d" : "s") + of.filter((step) => value >= step).length;
}

function referenceOf(one) {
  return series.find((other) => other.is_reference && other.reference === one.reference);
}

// The series whose top token another's is compared with: the other of a difference, or the reference.
function otherOf() {
  return MEASURES[choice.measure].difference ? series[choice.second] : referenceOf(series[choice.first]);
}

function hasTops() {
  const [first, other] = [series[choice.first], otherOf()];
  return first !== other && Boolean(first.tops && other?.tops);
}

// A function that says whether a token passes the filters; null where there are none.
function tokenFilter() {
  const above = byId("above").value === "" ? -Infinity : Number(byId("above").value);
  const onlyChanged = byId("changed").checked && hasTops();
  const [domain, tokenClass] = ["domain", "class"].map((name) => byId(name).value);
  if (above === -Infinity && !onlyChanged && !domain && !tokenClass) return null;
  const value = valuesOf();
  const [tops, others] = onlyChanged ? [series[choice.first].tops, otherOf().tops] : [];
  return (at) =>
    sizeOf(value(at)) > above &&
    (!onlyChanged || tops[at] !== others[at]) &&
    (!domain || passageOfToken[at].domain === Number(domain)) &&
    (!tokenClass || tokenClasses[at] === Number(tokenClass));
}

// Never in powers of ten, so that numbers of one column compare at a glance.
function twoDigits(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 2, useGrouping: false });
}

function number(value, digits = 3) {
  if (value === undefined || value === null || Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  if (value === 0) return "0";
  return Math.abs(value) < 0.001 ? twoDigits(value) : value.toFixed(digits);
}

function signed(value) {
  return (MEASURES[choice.measure].difference && value > 0 ? "+" : "") + number(value, 4);
}

function probability(nll) {
  const percent = 100 * Math.exp(-nll);
  return `${percent >= 0.1 ? percent.toFixed(1) : percent.toPrecision(1)} %`;
}

// --- The text ---

let order = [];
let shownFrom = 0;
let shownTo = 0;
let passes = null;
let numPassing = [];
let foundTokens = new Set();
const drawn = new Map();

function arrange() {
  const mean = valuesOf(true);
  const size = (index) => sizeOf(mean(index)) || 0;
  passes = tokenFilter();
  numPassing = passages.map(countPassing);
  order = passages.map((passage) => passage.index).filter((index) => numPassing[index] > 0);
  if (byId("order").value === "divergent") order.sort((a, b) => size(b) - size(a));
  byId("passages").classList.toggle("apart", byId("order").value === "divergent");
  drawn.clear();
  recolor();
  const firstKept = order.findIndex((index) => passages[index].kept);
  showFrom(Math.max(firstKept, 0));
}

// A passage without its text passes where there is no filter.
function countPassing(passage) {
  if (passes === null) return passage.size;
  let count = 0;
  if (passage.kept) for (let at = passage.start; at < passage.start + passage.size; at++) count += passes(at);
  return count;
}

function showFrom(place) {
  shownFrom = shownTo = place;
  drawn.clear();
  byId("passages").replaceChildren(order.length ? "" : "No token passes the filters.");
  showMore(1);
}

function showMore(direction) {
  const box = byId("passages");
  for (let budget = TOKENS_AT_ONCE; budget > 0 && (direction > 0 ? shownTo < order.length : shownFrom > 0); ) {
    const passage = passages[direction > 0 ? order[shownTo++] : order[--shownFrom]];
    const made = makePassage(passage);
    if (direction > 0) box.append(made);
    else box.prepend(made);
    budget -= passage.kept ? passage.size : TOKENS_AT_ONCE / 40;
  }
  byId("more").hidden = shownTo >= order.length;
  byId("earlier").hidden = shownFrom === 0;
}

function makePassage(passage) {
  const made = element("section", `passage${passage.kept ? "" : " left-out"}`, element("small", "place"));
  const prompt = data.prompts[passage.index];
  if (prompt) {
    const before = element("span", "prompt", prompt);
    before.title = "prompt, not scored";
    before.dir = "auto";
    made.append(before);
  } else if (data.has_gaps && passage.first === 0) {
    // Methods that score a part of each window leave out text before it.
    const gap = element("small", "quiet", "[…] ");
    gap.title = "text that is not scored";
    made.append(gap);
  }
  if (passage.kept) made.append(makeTokens(passage));
  drawn.set(passage.index, made);
  colorPassage(made, passage);
  return made;
}

function placeOf(passage) {
  const from = passage.first ? `, token ${(passage.first + 1).toLocaleString("en")}` : "";
  return `${windowsOf(passage)}${from} · ${shareBefore(passage)}`;
}

function colorPassage(made, passage) {
  const mean = valuesOf(true)(passage.index);
  const chip = element("span", `chip ${colorClass(mean, meanSteps)}`, signed(mean));
  chip.title = `mean ${chosenName()}, nats`;
  made.firstElementChild.replaceChildren(`${placeOf(passage)} `, chip, passage.kept ? "" : " Its text is left out.");
  if (passage.kept) colorTokens(made.lastElementChild);
}

function makeTokens(passage) {
  const box = element("span", "tokens");
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", `Tokens of ${windowsOf(passage)}`);
  box.dir = "auto";
  const texts = textsOf(passage);
  const runs = [...texts.join("").matchAll(BREAKS)].map(({ 0: run, index }) => ({ run, first: index, last: index + run.length }));
  let start = 0;
  for (const [offset, text] of texts.entries()) {
    const token = element("span", "", ...partsOf(text, start, runs));
    start += text.length;
    // Within a run of line breaks, and within a character, a token has a place but no text of its own.
    if (!token.textContent.replace("\n", "") && !token.querySelector(".break")) token.prepend(element("i", "part"));
    token.dataset.position = passage.start + offset;
    token.setAttribute("role", "option");
    token.tabIndex = offset ? -1 : 0;
    box.append(token);
  }
  return box;
}

// A token's text from a place of its passage on: blanks that are seen, and a run of line breaks as one mark with their
// number and one line break, whichever tokens it extends over. Runs that have ended are taken off.
function partsOf(text, start, runs) {
  const end = start + text.length;
  const parts = [];
  for (let at = start; at < end; ) {
    const { run, first, last } = runs[0] ?? { first: Infinity, last: Infinity };
    const next = Math.min(end, at < first ? first : last);
    if (at < first) parts.push(...blanksOf(text.slice(at - start, next - start)));
    else if (at === first) parts.push(breakMark(run.split("\n").length - 1));
    if (next === last) {
      parts.push("\n");
      runs.shift();
    }
    at = next;
  }
  return parts;
}

function breakMark(count) {
  return element("i", "break", count > 1 ? `×${count}` : "");
}

function blanksOf(text) {
  const names = { " ": "space", "\t": "tab" };
  return text.split(/([ \t])/).filter(Boolean).map((part) => (names[part] ? element("i", names[part], part) : part));
}

function colorTokens(box) {
  const value = valuesOf();
  for (const token of box.children) {
    const position = Number(token.dataset.position);
    const names = [passes && !passes(position) ? "out" : colorClass(value(position))];
    if (!data.vocabulary.texts[tokens[position]]) names.push("nameless");
    if (foundTokens.has(position)) names.push("found");
    if (tokenClasses[position]) names.push(`class-${tokenClasses[position]}`);
    token.className = names.join(" ");
  }
}

function recolor() {
  steps = fittedSteps(false);
  meanSteps = fittedSteps(true);
  for (const [index, made] of drawn) colorPassage(made, passages[index]);
  byId("colored").textContent = `${chosenName()}, nats`;
  drawLegend();
  drawStrip();
  drawList();
  if (shownToken !== null) showToken(shownToken);
}

function drawLegend() {
  const value = valuesOf();
  const counts = new Array(steps.length + 1).fill(0);
  for (let at = 0; at < tokens.length; at++) {
    if (!passes || passes(at)) counts[steps.filter((step) => value(at) >= step).length] += 1;
  }
  const items = counts.map((count, index) => {
    const end = index === 0 ? `< ${twoDigits(steps[0])}` : `≥ ${twoDigits(steps[index - 1])}`;
    const total = element("small", "", count.toLocaleString("en"));
    return element("li", colorClass(steps[index - 1] ?? -Infinity), end, total);
  });
  // A class between two equal steps has nothing.
  byId("legend").replaceChildren(...items.filter((item, index) => steps[index - 1] !== steps[index]));
}

// A cell is a passage, or several where there are very many.
function drawStrip() {
  const mean = valuesOf(true);
  const each = Math.ceil(passages.length / MOST_CELLS);
  const cells = [];
  for (let from = 0; from < passages.length; from += each) {
    const group = passages.slice(from, from + each);
    const size = group.reduce((sum, passage) => sum + passage.size, 0);
    const value = group.reduce((sum, passage) => sum + passage.size * mean(passage.index), 0) / size;
    const isOut = group.every((passage) => numPassing[passage.index] === 0);
    const cell = element("button", isOut ? "out" : colorClass(value, meanSteps));
    cell.tabIndex = from === 0 ? 0 : -1;
    cell.dataset.passage = from;
    cell.dataset.tip = `${placeOf(group[0])}: ${signed(value)}`;
    cell.setAttribute("aria-label", cell.dataset.tip);
    cells.push(cell);
  }
  byId("strip").replaceChildren(...cells);
}

function goToPassage(event) {
  const cell = event.target.closest("[data-passage]");
  if (cell === null) return;
  const from = Number(cell.dataset.passage);
  // The next that the filters leave, in the order in which the text is shown.
  const index = Math.min(...order.filter((each) => each >= from));
  if (index < Infinity) openPassage(passages[index]).scrollIntoView({ block: "start" });
}

// --- One token ---

let shownToken = null;

function rowsOf(position) {
  return series.map((one) => ({
    label: one.label,
    nll: one.nll[position],
    kld: one.kld?.[position],
    rank: one.ranks?.[position],
    top: one.tops?.[position],
    confidence: one.confidence?.[position],
    // Whether its top token is another one than the reference's.
    differs: one.tops !== null && referenceOf(one)?.tops[position] !== one.tops[position],
  }));
}

function showToken(position) {
  shownToken = position;
  const passage = passageOfToken[position];
  const offset = position - passage.start;
  const shown = element("bdi", colorClass(valuesOf()(position)), textAt(position));
  const place = `position ${(passage.first + offset + 1).toLocaleString("en")}, ${shareBefore(passage, offset)} of the text`;
  const parts = [data.class_names[tokenClasses[position]], data.domain_names[passage.domain]].filter(Boolean);
  const where = [`id ${tokenIds[tokens[position]]}`, windowsOf(passage), place, ...parts].join(", ");
  const value = `${chosenName()} ${signed(valuesOf()(position))}`;
  const close = element("button", "close", "Close");
  close.addEventListener("click", closeToken);
  const lines = [element("p", "shown", shown), element("p", "quiet", `${where}; ${value}`)];
  byId("token").replaceChildren(close, ...lines, topTable(position), tokenTable(position));
}

function closeToken() {
  shownToken = null;
  byId("token").replaceChildren(element("p", "quiet", "No token chosen."));
}

function barOf(share, text) {
  const bar = element("i");
  bar.style.width = `${100 * share}%`;
  return element("span", "bar", text, bar);
}

function topOf(row) {
  // The probability of a run's top token is known where it is the text's.
  const share = row.confidence ?? (row.rank === 1 ? Math.exp(-row.nll) : undefined);
  const bar = share === undefined ? "" : barOf(share, `${(100 * share).toFixed(1)} %`);
  return element("span", row.differs ? "differs" : "", element("bdi", "", aloneText(row.top)), bar);
}

function tokenTable(position) {
  const rows = rowsOf(position);
  const columns = [
    ["run", (row) => named(row.label)],
    ["logprob", (row) => number(-row.nll)],
    ["p", (row) => barOf(Math.exp(-row.nll), probability(row.nll))],
    ["rank", (row) => row.rank?.toLocaleString("en")],
    ["KL", (row) => (row.kld === undefined ? undefined : number(row.kld))],
    ["says", (row) => (row.top === undefined ? undefined : topOf(row))],
  ].filter(([, cell]) => rows.some((row) => cell(row) !== undefined));
  const headings = columns.map(([name]) => element("th", name, name));
  const lines = rows.map((row) => columns.map(([name, cell], at) => element(at ? "td" : "th", name, cell(row) ?? "-")));
  return makeTable("figures", headings, lines);
}

// NLLs of the top tokens of a run, or with `model` 1 of its reference, in their order; null where its file has none.
function topsOfRun(run, model, position) {
  const at = run.shown_at?.indexOf(position) ?? -1;
  if (at < 0) return null;
  const size = run.shown_tops.length / run.shown_at.length / 2;
  const from = (2 * at + model) * size;
  return new Map(Array.from(run.shown_tops.subarray(from, from + size), (place, index) => [place, run.shown_nlls[from + index]]));
}

function topsOf(one, position) {
  if (!one.is_reference) return topsOfRun(one, 0, position);
  const found = series.filter((run) => referenceOf(run) === one).map((run) => topsOfRun(run, 1, position));
  return found.find((tops) => tops !== null) ?? null;
}

// What each would have said instead: a row for every token that is among the top of one, the reference's first.
function topTable(position) {
  const chosen = MEASURES[choice.measure].difference ? [choice.first, choice.second] : [choice.first];
  const ordered = new Set([referenceOf(series[choice.first]), ...chosen.map((index) => series[index]), ...series]);
  const columns = [...ordered]
    .map((one) => ({ one, tops: one ? topsOf(one, position) : null }))
    .filter(({ tops }) => tops !== null);
  if (!columns.length) {
    const isElsewhere = series.some((one) => one.shown_at?.length);
    return isElsewhere ? element("p", "quiet", "More of what each would have said is here for the tokens that diverge most.") : "";
  }
  const actual = tokens[position];
  const places = new Set([...columns.flatMap(({ tops }) => [...tops.keys()]), actual]);
  const rows = Array.from(places, (place) => {
    const isActual = place === actual;
    const mark = isActual ? [" ", element("small", "", "in the text")] : [];
    const name = element("th", isActual ? "actual" : "", element("bdi", "", aloneText(place)), ...mark);
    const nll = ({ one, tops }) => (isActual ? one.nll[position] : tops.get(place));
    return [name, ...columns.map((column) => element("td", "", topCell(nll(column), column.tops)))];
  });
  const headings = ["top tokens", ...columns.map(({ one }) => one.label)].map((label) => element("th", "", named(label)));
  return element("div", "scrolls", makeTable("tops", headings, rows));
}

// Of a token that is not among them, it is known that it is less likely than the last of them.
function topCell(nll, tops) {
  const share = Math.exp(-(nll ?? [...tops.values()].at(-1)));
  const percent = share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
  return nll === undefined ? element("span", "quiet", `< ${percent.replace("< ", "")}`) : barOf(share, percent);
}

function speak(position) {
  const row = rowsOf(position)[choice.first];
  const rank = row.rank === undefined ? "" : `, rank ${row.rank}`;
  const value = `${MEASURES[choice.measure].name} ${signed(valuesOf()(position))}`;
  byId("spoken").textContent = `${textAt(position)}: logprob ${number(-row.nll)}, probability ${probability(row.nll)}${rank}, ${value}`;
}

function positionOf(target) {
  const token = target.closest("[data-position]");
  return token === null ? null : Number(token.dataset.position);
}

function moveFocus(event) {
  const token = event.target.closest("[data-position], [data-passage]");
  if (token === null || event.altKey || event.ctrlKey || event.metaKey) return;
  const moves = {
    ArrowRight: token.nextElementSibling,
    ArrowLeft: token.previousElementSibling,
    Home: token.parentElement.firstElementChild,
    End: token.parentElement.lastElementChild,
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  moves[event.key]?.focus();
}

function focused(event) {
  if (!event.target.matches("[data-position], [data-passage]")) return;
  for (const other of event.target.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  event.target.tabIndex = 0;
  const position = positionOf(event.target);
  if (position === null) return;
  showToken(position);
  speak(position);
}

// --- The list: the largest values, or what a search finds ---

function largest() {
  const value = valuesOf();
  const size = (position) => sizeOf(value(position));
  let top = [];
  let least = -Infinity;
  for (let position = 0; position < tokens.length; position++) {
    if (!(size(position) > least) || (passes && !passes(position))) continue;
    top.push(position);
    if (top.length < 4 * NUM_TOP) continue;
    top = top.sort((a, b) => size(b) - size(a)).slice(0, NUM_TOP);
    least = size(top[NUM_TOP - 1]);
  }
  return top.sort((a, b) => size(b) - size(a)).slice(0, NUM_TOP);
}

// The text that is here, in lower case, and where in it each token begins.
let searched = null;

function searchedText() {
  if (searched === null) {
    const starts = new Int32Array(tokens.length);
    const texts = keptPassages.flatMap(textsOf).map((text) => text.toLowerCase());
    let length = 0;
    for (const [position, text] of texts.entries()) {
      starts[position] = length;
      length += text.length;
    }
    searched = { text: texts.join(""), starts };
  }
  return searched;
}

// The first token of every place, and in `foundTokens` all tokens of all places.
function search(query) {
  foundTokens = new Set();
  if (!query) return [];
  const { text, starts } = searchedText();
  const places = [];
  let position = 0;
  for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length)) {
    while (position + 1 < tokens.length && starts[position + 1] <= at) position += 1;
    if (!numPassing[passageOfToken[position].index]) continue;
    places.push(position);
    for (let next = position; next < tokens.length && starts[next] < at + query.length; next++) foundTokens.add(next);
  }
  return places;
}

function drawList() {
  const query = byId("search").value.toLowerCase();
  const places = search(query);
  const listed = query ? places.slice(0, NUM_TOP) : largest();
  const found = `“${byId("search").value}”: ${places.length.toLocaleString("en")} places`;
  const heading = query ? found : `Largest ${chosenName()}`;
  byId("hits").textContent = query ? places.length.toLocaleString("en") : "";
  byId("top-heading").textContent = `${heading}${isCut ? " in the text kept here" : ""}`;
  byId("top").replaceChildren(...listed.map((position) => listItem(position, query !== "")));
}

function listItem(position, isFound) {
  const value = valuesOf()(position);
  const passage = passageOfToken[position];
  const textBetween = (from, to) => {
    return inLine(textsOf(passage).slice(Math.max(0, from - passage.start), to - passage.start).join(""));
  };
  const button = element(
    "button",
    "",
    element("span", "amount", signed(value)),
    element("bdi", "before", textBetween(position - NUM_AROUND, position)),
    " ",
    element("bdi", colorClass(value), textAt(position)),
    element("bdi", "before", isFound ? textBetween(position + 1, position + NUM_AROUND) : ""),
  );
  button.addEventListener("click", () => jumpTo(position));
  return element("li", "", button);
}

function recolorFound() {
  drawList();
  for (const [index, made] of drawn) colorPassage(made, passages[index]);
}

function openPassage(passage) {
  if (!drawn.has(passage.index)) showFrom(order.indexOf(passage.index));
  return drawn.get(passage.index);
}

function jumpTo(position) {
  const passage = passageOfToken[position];
  const token = openPassage(passage).lastElementChild.children[position - passage.start];
  token.scrollIntoView({ block: "center" });
  token.focus({ preventScroll: true });
}

// --- Choices ---

function comparable(first, second, measure = choice.measure) {
  const { of } = MEASURES[measure];
  const areKnown = [first, second].every((place) => data.series[place][of] !== null);
  return first !== second && areKnown && (of === "nll" || series[first].reference === series[second].reference);
}

function isOffered(place, measure = choice.measure) {
  const { of, difference } = MEASURES[measure];
  if (difference) return seriesPlaces.some((other) => comparable(place, other, measure));
  return data.series[place][of] !== null;
}

function offer(name, isEnabled) {
  const options = series.map((one, place) => new Option(one.label, place));
  for (const [place, option] of options.entries()) option.disabled = !isEnabled(place);
  byId(name).replaceChildren(...options);
  byId(name).value = choice[name];
}

function offerSeries() {
  const { difference } = MEASURES[choice.measure];
  if (!isOffered(choice.first)) choice.first = seriesPlaces.find((place) => isOffered(place));
  if (difference && !comparable(choice.first, choice.second)) {
    choice.second = seriesPlaces.find((place) => comparable(choice.first, place));
  }
  byId("measure").value = choice.measure;
  offer("first", isOffered);
  offer("second", (place) => place === choice.first || comparable(choice.first, place));
  byId("second-label").hidden = !difference;
  byId("changed-label").hidden = !hasTops();
}

// A filter by class or domain, where there are several. It gives those that occur.
function offerParts(name, names, values) {
  const present = [...new Set(values)].sort((a, b) => a - b);
  byId(name).append(new Option("all", ""), ...present.map((value) => new Option(names[value], value)));
  byId(`${name}-label`).hidden = present.length < 2;
  return present;
}

function choose() {
  choice.measure = byId("measure").value;
  choice.first = Number(byId("first").value);
  choice.second = Number(byId("second").value);
  offerSeries();
  // The text stays in its place unless other passages or another order are to be shown.
  if (passes || tokenFilter() || byId("order").value === "divergent") arrange();
  else recolor();
}

function start() {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  const worst = data.largest_kld;
  if (worst !== null) Object.assign(choice, { measure: "kld", first: worst });
  else if (series.length > 1) Object.assign(choice, { measure: "nll_difference", first: 1, second: 0 });
  for (const [name, measure] of Object.entries(MEASURES)) {
    if (seriesPlaces.some((place) => isOffered(place, name))) byId("measure").append(new Option(measure.name, name));
  }
  offerSeries();
  for (const name of ["measure", "first", "second"]) byId(name).addEventListener("change", choose);
  byId("domain-name").textContent = data.domains;
  offerParts("domain", data.domain_names, passages.map((passage) => passage.domain ?? 0));
  const marked = offerParts("class", data.class_names, tokenClasses).filter((each) => each > 0);
  byId("marks").append(...marked.flatMap((each) => [" ", element("span", `class-${each}`, data.class_names[each])]));
  byId("marks").hidden = !marked.length;
  for (const name of ["order", "changed", "above", "domain", "class"]) byId(name).addEventListener("change", arrange);
  byId("scale").addEventListener("change", recolor);
  byId("search").addEventListener("input", recolorFound);
  byId("more").addEventListener("click", () => showMore(1));
  byId("earlier").addEventListener("click", () => showMore(-1));
  byId("strip").addEventListener("click", goToPassage);
  byId("passages").addEventListener("mouseover", (event) => {
    const position = positionOf(event.target);
    // A sheet is below the pointer as it closes, and text then: it opens by a tap or a key alone.
    if (position !== null && !isNarrow.matches) showToken(position);
  });
  byId("view").addEventListener("focusin", focused);
  byId("view").addEventListener("keydown", moveFocus);
  byId("view").hidden = false;
  arrange();
}

start();
