// What the colors mean, and how many tokens have each rank.

import { DIFFERENCE_LIMIT, RANKS, SURPRISE_LIMIT, rankClass, rankColor } from "./colors.js";
import { element } from "./dom.js";
import { formatCount } from "./figures.js";

/** The legend of a mode, for a result of `/v1/score`. */
export function legend(mode, result) {
  if (mode === "rank") return rankClasses(result.ranks.filter((rank) => rank !== null));
  if (mode === "difference") {
    return [`less likely on the second server, by ${DIFFERENCE_LIMIT} nat or more`, scale("difference"), "likelier"];
  }
  return ["expected: 0 nats", scale("surprise"), `surprising: ${SURPRISE_LIMIT} nats or more`];
}

function scale(mode) {
  return element("span", { class: `scale ${mode}`, "aria-hidden": "true" });
}

function rankClasses(ranks) {
  const counts = Array(RANKS.length + 1).fill(0);
  for (const rank of ranks) counts[rankClass(rank)] += 1;
  const names = RANKS.map((rank) => (rank === 1 ? "rank 1" : `to ${formatCount(rank)}`));
  return [...names, "above"].map((name, at) => {
    const share = ranks.length ? Math.round((100 * counts[at]) / ranks.length) : 0;
    const made = element("span", { class: "class" }, `${name}: ${formatCount(counts[at])} (${share} %)`);
    made.style.background = rankColor(at < RANKS.length ? RANKS[at] : Infinity);
    return made;
  });
}
