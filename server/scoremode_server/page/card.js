// The figures of one token, on a card next to it.

import { element, row, visible } from "./dom.js";
import { differenceOf, formatCount, formatNumber, formatProbability } from "./figures.js";

const MARGIN = 8;
/* Pixels between the card, its token and the window's edges. */

/**
 * Fill the card of a token.
 *
 * @param names of the servers, one for each of `results`.
 * @param character the indices of the tokens that make its character, itself among them.
 */
export function fillCard(card, index, character, pieces, names, results) {
  card.replaceChildren(title(index, pieces, results[0]));
  if (character.length > 1) card.append(partsOfCharacter(character, results[0]));
  if (results[0].logprobs[index] === null) {
    card.append(element("p", {}, "The first token has no context, so it has no logprob."));
    return;
  }
  card.append(figures(index, names, results));
  results.forEach((result, at) => {
    if (result.top_logprobs) card.append(alternatives(index, result, results.length > 1 ? names[at] : null));
  });
}

function title(index, pieces, result) {
  const text = pieces[index].text;
  const shown = text === "" ? "part of a character" : visible(text);
  const id = ` token ${formatCount(index + 1)}, id ${result.token_ids[index]}`;
  return element("p", {}, element("bdi", { class: "token" }, shown), id);
}

function partsOfCharacter(character, result) {
  const logprobs = character.map((index) => formatNumber(result.logprobs[index]));
  return element("p", {}, `Its character has ${character.length} tokens, with logprobs ${logprobs.join(", ")}.`);
}

function figures(index, names, results) {
  const logprobs = results.map((result) => result.logprobs[index]);
  const rows = [
    row("logprob", logprobs.map((each) => formatNumber(each))),
    row("probability", logprobs.map(formatProbability)),
    row("rank", results.map((result) => formatCount(result.ranks[index]))),
  ];
  if (results.length > 1) {
    rows.unshift(row("", names, "th"));
    rows.push(row("difference", ["", formatNumber(differenceOf(...logprobs))]));
  }
  return element("table", {}, ...rows);
}

/** The top tokens at this token's position; the token itself is marked among them. */
function alternatives(index, result, name) {
  const rows = result.top_logprobs[index].map((each) => {
    const cells = [formatProbability(each.logprob), formatNumber(each.logprob)];
    const made = row(element("bdi", {}, visible(each.token)), cells);
    made.classList.toggle("same", each.token_id === result.token_ids[index]);
    return made;
  });
  const caption = name ? `top tokens, ${name}` : "top tokens";
  const headings = element("thead", {}, row(caption, ["probability", "logprob"], "th"));
  return element("table", { class: "alternatives" }, headings, element("tbody", {}, ...rows));
}

/** Put the card below a token, or above it where there is more room; hide it if the token is out of sight. */
export function placeCard(card, token, container) {
  const [at, frame] = [token.getClientRects()[0], container.getBoundingClientRect()];
  card.hidden = at.bottom < Math.max(frame.top, 0) || at.top > Math.min(frame.bottom, innerHeight);
  if (card.hidden) return;
  const { width, height } = card.getBoundingClientRect();
  const below = at.bottom + MARGIN;
  const fits = below + height <= innerHeight || at.top < innerHeight - at.bottom;
  card.style.top = `${fits ? below : Math.max(MARGIN, at.top - MARGIN - height)}px`;
  card.style.left = `${Math.max(MARGIN, Math.min(at.left, document.documentElement.clientWidth - width - MARGIN))}px`;
}
