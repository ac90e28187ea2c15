"use strict";

// Values that begin a new colour, in nats. They are the same in every report, so that pictures of two compare.
const NLL_STEPS = [0.1, 0.5, 1, 2, 3, 5, 7, 10];
const KLD_STEPS = [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1];
const DIFFERENCE_STEPS = [-1, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1];
const PASSAGES_AT_ONCE = 40;
const NUM_TOP = 50;
const NUM_BEFORE = 8;

const MEASURES = {
  nll: { name: "surprise (NLL)", of: "nll", difference: false, steps: NLL_STEPS, colours: "s" },
  kld: { name: "KL divergence from the reference", of: "kld", difference: false, steps: KLD_STEPS, colours: "s" },
  nll_difference: { name: "difference of NLL", of: "nll", difference: true, steps: DIFFERENCE_STEPS, colours: "d" },
  kld_difference: { name: "difference of KL divergence", of: "kld", difference: true, steps: DIFFERENCE_STEPS, colours: "d" },
};

const byId = (id) => document.getElementById(id);

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
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
  const value = (row) => row.cells[column].dataset.value;
  // Infinity less infinity is not a number.
  const difference = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const compare = (a, b) => {
    // What is not known comes last in both directions.
    if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
    return sign * (isNumber ? difference(Number(value(a)), Number(value(b))) : value(a).localeCompare(value(b)));
  };
  body.append(...[...body.rows].sort(compare));
}

// --- Data ---

const HALVES = new Float32Array(65536);
for (let bits = 0; bits < 65536; bits++) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size =
    exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
  HALVES[bits] = bits & 32768 ? -size : size;
}

function unpack(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  if (packed.type === "int32") return new Int32Array(bytes.buffer);
  if (packed.type === "float32") return new Float32Array(bytes.buffer);
  const codes = new Uint16Array(bytes.buffer);
  if (packed.scale === null) return codes;
  if (packed.type === "float16") return Float32Array.from(codes, (code) => HALVES[code] * packed.scale);
  return Float32Array.from(codes, (code) => (code === 65535 ? Infinity : code * packed.scale));
}

// Arrays are unpacked when they are first asked for.
function lazy(packed) {
  const values = {};
  for (const [name, value] of Object.entries(packed)) {
    if (value === null || value.data === undefined) values[name] = value;
    else Object.defineProperty(values, name, { configurable: true, enumerable: true, get() {
      const array = unpack(value);
      Object.defineProperty(values, name, { value: array, enumerable: true });
      return array;
    } });
  }
  return values;
}

const data = JSON.parse(byId("data").textContent);
const series = data.series.map(lazy);
const has = data.series.map((one) => ({ nll: one.nll !== null, kld: one.kld !== null }));
const tokens = unpack(data.tokens);
const tokenIds = unpack(data.vocabulary.ids);
const passages = makePassages(lazy(data.passages));

function makePassages(arrays) {
  let start = 0;
  return Array.from(arrays.size, (size, index) => {
    const kept = arrays.kept[index] === 1;
    const [window, lastWindow] = [arrays.window[index], arrays.last_window[index]];
    const passage = { index, size, kept, window, lastWindow, first: arrays.first[index], start: kept ? start : -1 };
    if (kept) start += size;
    return passage;
  });
}

const keptPassages = passages.filter((passage) => passage.kept);
const isCut = keptPassages.length < passages.length;

function passageOf(position) {
  let low = 0;
  let high = keptPassages.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (keptPassages[middle].start <= position) low = middle;
    else high = middle - 1;
  }
  return keptPassages[low];
}

function windowsOf({ window, lastWindow }) {
  const [first, last] = [window + 1, lastWindow + 1].map((number) => number.toLocaleString("en"));
  return first === last ? `window ${first}` : `windows ${first} to ${last}`;
}

function textOf(place) {
  const text = data.vocabulary.texts[place];
  return text ? text : `⟨${tokenIds[place]}⟩`;
}

// Where a token stands by itself, what would show nothing or break a line has a sign.
function aloneText(place) {
  return textOf(place).replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// --- What the colours show ---

const choice = { measure: "nll", first: 0, second: 0 };

function chosen(mean = false) {
  const measure = MEASURES[choice.measure];
  const name = mean ? `mean_${measure.of}` : measure.of;
  const first = series[choice.first][name];
  if (!measure.difference) return (index) => first[index];
  const second = series[choice.second][name];
  // Infinity less infinity is no difference.
  return (index) => (first[index] === second[index] ? 0 : first[index] - second[index]);
}

function colourClass(value) {
  const { steps, colours } = MEASURES[choice.measure];
  return colours + steps.filter((step) => value >= step).length;
}

function number(value, digits = 3) {
  if (value === undefined || value === null || Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  if (value === 0) return "0";
  return Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(digits);
}

function signed(value) {
  return (MEASURES[choice.measure].difference && value > 0 ? "+" : "") + number(value, 4);
}

function probability(nll) {
  const percent = 100 * Math.exp(-nll);
  return `${percent >= 0.1 ? percent.toFixed(1) : percent.toPrecision(1)} %`;
}

// --- Passages ---

let order = [];
let numShown = 0;
const details = new Map();

function arrangePassages() {
  const mean = chosen(true);
  const size = (index) => Math.abs(mean(index)) || 0;
  order = passages.map((passage) => passage.index);
  if (byId("order").value === "divergent") order.sort((a, b) => size(b) - size(a));
  numShown = 0;
  byId("passages").replaceChildren();
  showMore(PASSAGES_AT_ONCE);
}

function showMore(count) {
  const next = order.slice(numShown, numShown + count).map((index) => passageElement(passages[index]));
  byId("passages").append(...next);
  numShown += next.length;
  byId("more").hidden = numShown >= order.length;
}

function passageElement(passage) {
  if (!details.has(passage.index)) details.set(passage.index, passage.kept ? makeDetails(passage) : makeLine(passage));
  const made = details.get(passage.index);
  describePassage(made, passage);
  return made;
}

function makeDetails(passage) {
  const made = element("details", "passage");
  made.append(element("summary"));
  made.addEventListener("toggle", () => {
    if (made.open && made.childElementCount === 1) made.append(makeTokens(passage));
    if (made.open) colourTokens(made.lastElementChild, passage);
  });
  return made;
}

function makeLine(passage) {
  const made = element("div", "passage");
  made.append(element("p"));
  return made;
}

function describePassage(made, passage) {
  const value = chosen(true)(passage.index);
  const measure = MEASURES[choice.measure];
  const last = passage.first + passage.size;
  const windows = windowsOf(passage).replace("w", "W");
  const place = `${windows}, tokens ${(passage.first + 1).toLocaleString("en")} to ${last.toLocaleString("en")}: `;
  const chip = element("span", `chip ${colourClass(value)}`, signed(value));
  chip.title = `mean ${measure.name}, nats`;
  made.firstElementChild.replaceChildren(place, chip, ` mean ${measure.name}${passage.kept ? "" : ". Its text is left out."}`);
}

function makeTokens(passage) {
  const box = element("div", "tokens");
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", `Tokens of ${windowsOf(passage)}`);
  box.dir = "auto";
  for (let position = passage.start; position < passage.start + passage.size; position++) {
    const [line, ...lines] = textOf(tokens[position]).split("\n");
    const token = element("span", "", line);
    for (const next of lines) token.append(element("i", "break"), `\n${next}`);
    token.dataset.position = position;
    token.setAttribute("role", "option");
    token.tabIndex = position === passage.start ? 0 : -1;
    box.append(token);
  }
  return box;
}

function colourTokens(box, passage) {
  const value = chosen();
  for (const token of box.children) {
    const isNameless = !data.vocabulary.texts[tokens[token.dataset.position]];
    token.className = colourClass(value(Number(token.dataset.position))) + (isNameless ? " nameless" : "");
  }
}

function recolour() {
  arrangePassages();
  for (const [index, made] of details) {
    if (made.open) colourTokens(made.lastElementChild, passages[index]);
  }
  drawLegend();
  drawTop();
}

function drawLegend() {
  const { steps, colours } = MEASURES[choice.measure];
  const items = [];
  for (let index = 0; index <= steps.length; index++) {
    const text =
      index === 0 ? `below ${steps[0]}` : index === steps.length ? `${steps[index - 1]} and more` : `${steps[index - 1]} to ${steps[index]}`;
    items.push(element("li", colours + index, text));
  }
  byId("legend").replaceChildren(...items);
}

// --- One token ---

function rowsOf(position) {
  return series.map((one) => ({
    label: one.label,
    nll: one.nll[position],
    kld: one.kld === null ? undefined : one.kld[position],
    rank: one.ranks === null ? undefined : one.ranks[position],
    top: one.tops === null ? undefined : aloneText(one.tops[position]),
    confidence: one.confidence === null ? undefined : one.confidence[position],
  }));
}

function showToken(position) {
  const passage = passageOf(position);
  const shown = element("p", "shown");
  const isolated = element("bdi", colourClass(chosen()(position)), aloneText(tokens[position]));
  shown.append(isolated);
  const where = `token ${tokenIds[tokens[position]]}, ${windowsOf(passage)}, position ${(passage.first + position - passage.start + 1).toLocaleString("en")}; `;
  const value = `${MEASURES[choice.measure].name} ${signed(chosen()(position))}`;
  byId("token").replaceChildren(shown, element("p", "quiet", where + value), tokenTable(position));
}

function numberClass(column) {
  return column === "run" || column === "prefers" ? "" : "number";
}

function tokenTable(position) {
  const rows = rowsOf(position);
  const columns = [
    ["run", (row) => row.label],
    ["logprob", (row) => number(-row.nll)],
    ["p", (row) => probability(row.nll)],
    ["rank", (row) => (row.rank === undefined ? undefined : row.rank.toLocaleString("en"))],
    ["KL", (row) => (row.kld === undefined ? undefined : number(row.kld))],
    ["prefers", (row) => row.top],
  ].filter(([, cell]) => rows.some((row) => cell(row) !== undefined));
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const [name] of columns) head.append(element("th", numberClass(name), name));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const [name, cell] of columns) {
      const text = cell(row);
      const box = element(name === "run" ? "th" : "td", numberClass(name));
      if (name === "run") box.scope = "row";
      if (text === undefined) box.textContent = "-";
      else box.append(element("bdi", "", text));
      if (name === "prefers" && row.confidence !== undefined) box.append(`\n(${(100 * row.confidence).toFixed(1)} %)`);
      line.append(box);
    }
  }
  return table;
}

function speak(position) {
  const row = rowsOf(position)[choice.first];
  const rank = row.rank === undefined ? "" : `, rank ${row.rank}`;
  const value = `${MEASURES[choice.measure].name} ${signed(chosen()(position))}`;
  byId("spoken").textContent = `${aloneText(tokens[position])}: logprob ${number(-row.nll)}, probability ${probability(row.nll)}${rank}, ${value}`;
}

function positionOf(target) {
  const token = target instanceof Element ? target.closest("[data-position]") : null;
  return token === null ? null : Number(token.dataset.position);
}

function moveFocus(event) {
  const token = event.target.closest("[data-position]");
  if (token === null || event.altKey || event.ctrlKey || event.metaKey) return;
  const moves = {
    ArrowRight: token.nextElementSibling,
    ArrowLeft: token.previousElementSibling,
    Home: token.parentElement.firstElementChild,
    End: token.parentElement.lastElementChild,
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  if (moves[event.key]) moves[event.key].focus();
}

function focused(event) {
  const position = positionOf(event.target);
  if (position === null) return;
  for (const other of event.target.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  event.target.tabIndex = 0;
  showToken(position);
  speak(position);
}

// --- The largest values ---

function largest() {
  const value = chosen();
  const difference = MEASURES[choice.measure].difference;
  const size = (position) => (difference ? Math.abs(value(position)) : value(position));
  let top = [];
  let least = -Infinity;
  for (let position = 0; position < tokens.length; position++) {
    if (!(size(position) > least)) continue;
    top.push(position);
    if (top.length < 4 * NUM_TOP) continue;
    top = top.sort((a, b) => size(b) - size(a)).slice(0, NUM_TOP);
    least = size(top[NUM_TOP - 1]);
  }
  return top.sort((a, b) => size(b) - size(a)).slice(0, NUM_TOP);
}

function drawTop() {
  const value = chosen();
  byId("top-heading").textContent = `Largest ${MEASURES[choice.measure].name}${isCut ? " in the text kept here" : ""}`;
  byId("top").replaceChildren(
    ...largest().map((position) => {
      const button = element("button");
      button.type = "button";
      const passage = passageOf(position);
      const before = [];
      for (let at = Math.max(passage.start, position - NUM_BEFORE); at < position; at++) before.push(aloneText(tokens[at]));
      button.append(
        element("span", "amount", signed(value(position))),
        element("bdi", "before", before.join("")),
        " ",
        element("bdi", colourClass(value(position)), aloneText(tokens[position])),
      );
      button.addEventListener("click", () => jumpTo(position));
      const item = element("li");
      item.append(button);
      return item;
    }),
  );
}

function openPassage(passage) {
  const place = order.indexOf(passage.index);
  if (place >= numShown) showMore(place + 1 - numShown);
  const made = details.get(passage.index);
  if (made.childElementCount === 1) made.append(makeTokens(passage));
  colourTokens(made.lastElementChild, passage);
  made.open = true;
  return made;
}

function jumpTo(position) {
  const passage = passageOf(position);
  const made = openPassage(passage);
  const token = made.lastElementChild.children[position - passage.start];
  token.scrollIntoView({ block: "center" });
  token.focus({ preventScroll: true });
}

// --- Choices ---

function option(value, text, disabled = false) {
  const made = element("option", "", text);
  made.value = value;
  made.disabled = disabled;
  return made;
}

function comparable(first, second) {
  const { of } = MEASURES[choice.measure];
  return first !== second && has[first][of] && has[second][of] && (of === "nll" || series[first].reference === series[second].reference);
}

function offerMeasures() {
  const withKld = series.filter((one, index) => has[index].kld);
  const references = new Set(withKld.map((one) => one.reference));
  const offered = {
    nll: true,
    kld: withKld.length > 0,
    nll_difference: series.length > 1,
    kld_difference: withKld.length > references.size,
  };
  const names = Object.keys(MEASURES).filter((name) => offered[name]);
  byId("measure").replaceChildren(...names.map((name) => option(name, MEASURES[name].name)));
}

function offerSeries() {
  const { of, difference } = MEASURES[choice.measure];
  const places = [...series.keys()];
  const second = (first) => places.find((index) => comparable(first, index));
  const offered = (index) => has[index][of] && (!difference || second(index) !== undefined);
  if (!offered(choice.first)) choice.first = places.find(offered);
  if (difference && !comparable(choice.first, choice.second)) choice.second = second(choice.first);
  byId("first").replaceChildren(...series.map((one, index) => option(index, one.label, !offered(index))));
  byId("second").replaceChildren(
    ...series.map((one, index) => option(index, one.label, index !== choice.first && !comparable(choice.first, index))),
  );
  byId("measure").value = choice.measure;
  byId("first").value = choice.first;
  byId("second").value = choice.second;
  byId("second-label").hidden = !difference;
}

function choose() {
  choice.measure = byId("measure").value;
  choice.first = Number(byId("first").value);
  choice.second = Number(byId("second").value);
  offerSeries();
  recolour();
}

function firstChoice() {
  const worst = data.largest_kld;
  if (worst !== null) Object.assign(choice, { measure: "kld", first: worst });
  else if (series.length > 1) Object.assign(choice, { measure: "nll_difference", first: 1, second: 0 });
}

function start() {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  firstChoice();
  offerMeasures();
  offerSeries();
  for (const name of ["measure", "first", "second"]) byId(name).addEventListener("change", choose);
  byId("order").addEventListener("change", arrangePassages);
  byId("more").addEventListener("click", () => showMore(PASSAGES_AT_ONCE));
  byId("passages").addEventListener("mouseover", (event) => {
    const position = positionOf(event.target);
    if (position !== null) showToken(position);
  });
  byId("passages").addEventListener("focusin", focused);
  byId("passages").addEventListener("keydown", moveFocus);
  byId("view").hidden = false;
  recolour();
  if (keptPassages.length) openPassage(keptPassages[0]);
}

start();
