// What color a token has, by its surprise, its rank, or the difference of two servers. The hues are in page.css.

import { differenceOf } from "./figures.js";

export const SURPRISE_LIMIT = 10;
/* Nats from which on a token has the full color. */

export const DIFFERENCE_LIMIT = 1;
/* Nats of difference from which on a token has the full color. */

export const RANKS = [1, 10, 100, 1000];
/* The last rank of each class but the last one, as in GLTR. */

/** A color that grows with -ln p, in nats. */
export function surpriseColor(logprob) {
  return hue("--surprise", -logprob / SURPRISE_LIMIT);
}

/** The color of the class that a rank is in. */
export function rankColor(rank) {
  return `var(--rank-${rankClass(rank)})`;
}

/** One color where the second server finds the token likelier, another where the first one does. */
export function differenceColor(logprob, second) {
  const difference = differenceOf(logprob, second);
  return hue(difference > 0 ? "--likelier" : "--less-likely", Math.abs(difference) / DIFFERENCE_LIMIT);
}

/** 0 for the top token, 4 for ranks above all of RANKS. */
export function rankClass(rank) {
  const index = RANKS.findIndex((last) => rank <= last);
  return index < 0 ? RANKS.length : index;
}

function hue(name, share) {
  return `rgb(var(${name}) / ${Math.min(Math.max(share, 0), 1).toFixed(3)})`;
}
