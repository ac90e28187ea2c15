// What leaves the page: a link to a text, and its figures as JSON or CSV.

import { differenceOf } from "./figures.js";
import { LOWEST_LOGPROB, ShownError } from "./server.js";

export const MODES = ["surprise", "rank", "difference"];

const LONGEST_LINK = 16_000;
/* Characters. Browsers and what sends links cut longer ones off. */

/**
 * The page's URL with a text and what it is colored by, in the fragment: no server is sent it, and it names none.
 *
 * Throws a ShownError if it would be too long.
 */
export function linkTo(text, mode) {
  const url = new URL(location.href);
  url.hash = new URLSearchParams({ text, mode });
  if (url.href.length > LONGEST_LINK) throw new ShownError("The text is too long for a link.");
  return url.href;
}

/** The text and mode that the page was opened with; the text is null where there is none, the mode by default. */
export function linked() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const mode = MODES.includes(fields.get("mode")) ? fields.get("mode") : null;
  return { text: fields.get("text"), mode };
}

/** Results as `/v1/score` has them. */
export function asJson({ text, models, results, windows }) {
  const finite = (value) => (value === -Infinity ? LOWEST_LOGPROB : value);
  const cut = windows && { method: "sliding", context_length: windows.context, stride: windows.stride };
  const data = results.map((result, at) => ({ model: models[at], ...result }));
  return JSON.stringify({ text, windows: cut, data }, (_, value) => finite(value), 2);
}

/** A line for each token. */
export function asCsv({ pieces, results: [first, second] }) {
  const figures = ["logprob", "rank"];
  const ofSecond = second ? [...figures.map((name) => `second_${name}`), "difference"] : [];
  const rows = first.token_ids.map((id, index) => {
    const cells = [index + 1, id, pieces[index].text, first.logprobs[index], first.ranks[index]];
    if (second) cells.push(second.logprobs[index], second.ranks[index]);
    const isScored = second && first.logprobs[index] !== null;
    if (second) cells.push(isScored ? differenceOf(first.logprobs[index], second.logprobs[index]) : null);
    return cells;
  });
  return [["position", "token_id", "text", ...figures, ...ofSecond], ...rows].map(csvLine).join("");
}

function csvLine(cells) {
  const quoted = cells.map((cell) => (typeof cell === "string" ? `"${cell.replaceAll('"', '""')}"` : (cell ?? "")));
  return `${quoted.join(",")}\r\n`;
}

/** Put a text on the clipboard, for which `navigator.clipboard` needs https. Throws a ShownError if that fails. */
export function copy(text) {
  const fill = (event) => {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  };
  document.addEventListener("copy", fill);
  const isCopied = document.execCommand("copy");
  document.removeEventListener("copy", fill);
  if (!isCopied) throw new ShownError("The browser does not let the page copy.");
}
