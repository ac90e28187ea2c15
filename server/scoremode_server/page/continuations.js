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
  if (!given.length) throw new ShownError("There is no continuation to compare: type in one a line.");
  return given.map((line) => (isSeparate || /^\s/.test(line) ? line : ` ${line}`));
}

/** Ask a server for scores of continuations: the figures of each. */
export async function scoreContinuations(server, prompt, continuations, signal) {
  const text = await server.score({ prompt, continuations }, signal);
  const answer = server.scoresOfContinuations(text, continuations.length);
  // As lm-eval joins them: white space that ends the prompt goes to the continuation.
  const moved = prompt.slice(prompt.trimEnd().length);
  return answer.data.map((result, index) => continuationFigures(result, moved + continuations[index]));
}

/** Fill a table with the figures of each continuation, and return in words which one is preferred. */
export function showPreference(table, continuations, figures) {
  const best = Object.keys(COLUMNS).map((column) => indexOfLargest(figures.map((each) => each[column])));
  const rows = figures.map((each, index) => {
    const preferences = Object.keys(COLUMNS).map((column) => formatNumber(each[column]));
    const cells = [...preferences, each.tokens, each.isGreedy ? "yes" : "no"];
    const made = row(element("bdi", {}, continuations[index].replace(/^\s+|\s+$/g, visible)), cells);
    best.forEach((preferred, column) => made.cells[column + 1].classList.toggle("best", preferred === index));
    return made;
  });
  const head = element("thead", {}, row("continuation", [...Object.values(COLUMNS), "tokens", "greedy"], "th"));
  table.replaceChildren(head, element("tbody", {}, ...rows));
  // Where all are impossible none is better than another.
  if (best.includes(-1)) return "The model finds each of them impossible.";
  return inWords(best.map((index) => `“${continuations[index].trim()}”`));
}

/** The index of the largest value, -1 where all are minus infinity. */
function indexOfLargest(values) {
  return values.findIndex((value) => value > -Infinity && value === Math.max(...values));
}

function inWords([bySum, byToken, byByte]) {
  if (bySum === byToken && bySum === byByte) return `The model prefers ${bySum}.`;
  return `The model prefers ${bySum} by the sum of logprobs, ${byToken} per token, ${byByte} per byte.`;
}
