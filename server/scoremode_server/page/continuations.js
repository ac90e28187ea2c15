// Which of several continuations of a text a model prefers.

import { element, row, visible } from "./dom.js";
import { continuationFigures, formatNumber } from "./figures.js";
import { ShownError } from "./server.js";

const COLUMNS = { sumLogprob: "sum of logprobs", perToken: "per token", perByte: "per byte" };

/**
 * The lines of a text as continuations of `prompt`. With `spaces`, one before each where neither side has any.
 *
 * Throws a ShownError if there are none.
 */
export function continuationsOf(lines, prompt, spaces) {
  const isSeparate = !spaces || /\s$/.test(prompt);
  const given = lines.split("\n").filter((line) => line.trim());
  if (!given.length) throw new ShownError("There is no continuation to compare: type in one per line.");
  return given.map((line) => (isSeparate || /^\s/.test(line) ? line : ` ${line}`));
}

/** Ask a server for scores of continuations: its model, and the figures of each. */
export async function scoreContinuations(server, prompt, continuations, signal) {
  const text = await server.score({ prompt, continuations }, signal);
  const answer = server.scoresOfContinuations(text, continuations.length);
  // As lm-eval joins them: white space that ends the prompt goes to the continuation.
  const moved = prompt.slice(prompt.trimEnd().length);
  const figures = answer.data.map((result, index) => continuationFigures(result, moved + continuations[index]));
  return { model: answer.model, figures };
}

/** A table with the figures of each continuation on one server; `name` is null where there is no other. */
export function continuationsTable(name, continuations, figures) {
  const best = bestOf(figures);
  const rows = figures.map((each, index) => {
    const preferences = Object.keys(COLUMNS).map((column) => formatNumber(each[column]));
    const cells = [...preferences, each.tokens, each.isGreedy ? "yes" : "no"];
    const made = row(element("bdi", {}, continuations[index].replace(/^\s+|\s+$/g, visible)), cells);
    best.forEach((preferred, column) => made.cells[column + 1].classList.toggle("best", preferred === index));
    return made;
  });
  const columns = [...Object.values(COLUMNS), "tokens", "greedy"];
  const head = element("thead", {}, row(name ?? "continuation", columns, "th"));
  return element("table", {}, head, element("tbody", {}, ...rows));
}

/** Which continuation a model prefers, in words. */
export function preference(name, continuations, figures) {
  const best = bestOf(figures);
  const subject = name ?? "The model";
  // Where all are impossible none is better than another.
  if (best.includes(-1)) return `${subject} finds each of them impossible.`;
  const [bySum, byToken, byByte] = best.map((index) => `“${continuations[index].trim()}”`);
  if (bySum === byToken && bySum === byByte) return `${subject} prefers ${bySum}.`;
  return `${subject} prefers ${bySum} by the sum of logprobs, ${byToken} per token, ${byByte} per byte.`;
}

/** The index of the best continuation by each column, -1 where all are minus infinity. */
function bestOf(figures) {
  return Object.keys(COLUMNS).map((column) => {
    const values = figures.map((each) => each[column]);
    return values.findIndex((value) => value > -Infinity && value === Math.max(...values));
  });
}
