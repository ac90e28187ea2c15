"""Compares logprobs of the same tokens by two computations, in float64, and judges whether a column of logprobs is what
a server computes in a lane; if not, what it would take to be so.

For a pair q / p and r = q / p, the means of k1 = -ln r, k2 = (ln r)² / 2 and k3 = r - 1 - ln r estimate KL(p ‖ q) if p
drew the tokens (Schulman). The floor is the mean of |ln r| for a lane in other batches and the lane.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from scoremode.kld import Floats, quantile, standard_error, times_the_floor
from scoremode.runs.lanes import range_of
from scoremode.runs.rollouts import Source
from scoremode.wire import Lane

CLIP = 0.2
"""A ratio leaves 1 ± this."""
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

LEAST_FLOOR = 1e-4
"""A smaller floor, in nats, counts as this one: engines and trainers write logprobs rounded to 32 bits or less."""
MARGIN = 1.5
"""A mean absolute difference of up to this many floors is within the floor."""
FAR_RANGE, FAR_ROW = 2, 3
"""The same for a range of positions, and for a row in multiples of the row with the largest floor."""
_ONE_SIDED = 0.999
_NAMED_ROWS = 5
AGAIN = " again"
"""Suffix of a lane's name: the same lane in other batches."""


# Ratios may be infinite. Figures that they make undefined become None.
@np.errstate(over="ignore", invalid="ignore")
def figures(log_ratios: Floats, rows: NDArray[np.integer], threshold: float) -> dict[str, float]:
    """Figures of tokens [n] with the log ratios ln q - ln p; docs/parity.md has their formulas.

    Args:
        log_ratios: The log ratio of each token.
        rows: The index of each token's row. Every row has tokens.
        threshold: A ratio is beyond it if it is outside [1 / threshold, threshold].
    """
    counts, log_weights, ratios = np.bincount(rows), np.bincount(rows, log_ratios), np.exp(log_ratios)
    absolute, off, weights = np.abs(log_ratios), np.expm1(log_ratios), np.exp(log_weights - log_weights.max())
    ordered = np.sort(absolute)
    return {
        "num_tokens": len(log_ratios),
        "mean": log_ratios.mean(),
        "mean_absolute": absolute.mean(),
        **{name: quantile(ordered, fraction) for name, fraction in _QUANTILES.items()},
        "largest": ordered[-1],
        "k1": -log_ratios.mean(),
        "k2": np.square(log_ratios).mean() / 2,
        "k3": (off - log_ratios).mean(),
        "ratio_share": (np.abs(off) > CLIP).mean(),
        "ess_tokens": (np.bincount(rows, ratios) ** 2 / (counts * np.bincount(rows, ratios**2))).mean(),
        "ess_batch": weights.sum() ** 2 / (len(weights) * np.square(weights).sum()),
        "masked_by_mean": (np.abs(log_weights / counts) > math.log(threshold)).mean(),
        "masked_by_token": len(np.unique(rows[absolute > math.log(threshold)])) / len(counts),
    }


def range_in_words(number: int) -> str:
    """The positions of a range, as `range_of` numbers them."""
    return f"{2**number:,} to {2 ** (number + 1) - 1:,}"


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The compared tokens of all rows: arrays [n]."""

    rows: NDArray[np.int64]
    """The index of each target's row in the file, ascending."""
    positions: NDArray[np.int64]
    """How many tokens come before each target."""
    token_ids: NDArray[np.int32]
    logprobs: Mapping[str, Floats]
    """The logprobs of each column, and of each lane in two runs, by name."""

    @property
    def follows(self) -> NDArray[np.bool_]:
        """Whether each target is the token after the target before it."""
        is_same_row = np.diff(self.rows, prepend=-1) == 0
        is_next: NDArray[np.bool_] = is_same_row & (np.diff(self.positions, prepend=-1) == 1)
        return is_next

    def log_ratios(self, q: str, p: str) -> Floats:
        """ln q - ln p of each target, for the names of two computations."""
        return self.logprobs[q] - self.logprobs[p]

    def floors(self, lane: Lane) -> Floats:
        """How far each target's logprobs in the two runs are apart."""
        return np.abs(self.log_ratios(lane + AGAIN, lane))

    def floor(self, lane: Lane) -> float:
        return max(float(self.floors(lane).mean()), LEAST_FLOOR)


class Finding(BaseModel):
    """Whether a column is what the server computes in the nearer lane."""

    source: Source
    lane: Lane
    is_within: bool
    sentence: str


def shifted(targets: Targets, source: Source) -> dict[str, Floats]:
    """Absolute differences of a column from logprobs of the tokens next to its own, by what this would mean."""
    column, lane, follows = targets.logprobs[source], targets.logprobs["prefill"], targets.follows[1:]
    pairs = {"next token": column[:-1] - lane[1:], "token before": column[1:] - lane[:-1]}
    return {
        f"if each logprob is that of the {token}: they are shifted by one": np.abs(off[follows])
        for token, off in pairs.items()
        if follows.any()
    }


def judge(source: Source, targets: Targets, hypotheses: Mapping[str, Floats]) -> Finding:
    """Compare a column with both lanes. If it is not within the floor of the nearer lane, name what brings it back
    there, such as the nearest of `hypotheses`, which have absolute differences of targets."""
    distances: dict[Lane, Floats] = {
        "decode": np.abs(targets.log_ratios(source, "decode")),
        "prefill": np.abs(targets.log_ratios(source, "prefill")),
    }
    lane: Lane = "decode" if source == "sampler" else "prefill"
    if distances[lane].mean() > MARGIN * targets.floor(lane):
        lane = min(distances, key=lambda lane: distances[lane].mean())
    off, floor, ranges = distances[lane], targets.floor(lane), range_of(targets.positions)
    far_rows = _far_rows(off, targets, lane)
    far_ranges = [number for number in np.unique(ranges).tolist() if _is_far(off, ranges == number, targets, lane)]
    times = f"{times_the_floor(off.mean() / floor)} the floor"
    is_within = bool(off.mean() <= MARGIN * floor and not len(far_rows) and not far_ranges)
    if is_within:
        sentence = f"the {source} is the {lane} lane (within the floor)"
    elif cause := _general_cause(targets, hypotheses, off.mean()) or _local_cause(
        off,
        MARGIN * floor,
        {
            _without_rows(far_rows): np.isin(targets.rows, far_rows),
            f"without positions {', '.join(map(range_in_words, far_ranges))}": np.isin(ranges, far_ranges),
        },
    ):
        sentence = f"the {source} is {times} away from the {lane} lane, and within the floor {cause}"
    elif (targets.log_ratios(source, lane) > -FAR_ROW * floor).mean() > _ONE_SIDED:
        sentence = (
            f"the {source} is {times} above the {lane} lane and nowhere below it: its logprobs are normalized over a "
            "part of the vocabulary, as by top-k or top-p, so figures mean nothing"
        )
    else:
        sentence = f"the {source} is {times} away from the {lane} lane{_most_beyond(off, targets.positions)}"
    return Finding(source=source, lane=lane, is_within=is_within, sentence=sentence)


def _far_rows(off: Floats, targets: Targets, lane: Lane) -> NDArray[np.intp]:
    counts = np.bincount(targets.rows)
    largest = (np.bincount(targets.rows, targets.floors(lane)) / counts).max()
    return np.flatnonzero(np.bincount(targets.rows, off) / counts > FAR_ROW * max(largest, LEAST_FLOOR))


def _is_far(off: Floats, members: NDArray[np.bool_], targets: Targets, lane: Lane) -> bool:
    """Whether the members are so far from a lane that it is not chance, given the distances of all targets."""
    floors = targets.floors(lane)[members]
    excess = off[members] - floors
    margin = (FAR_RANGE - 1) * max(float(floors.mean()), targets.floor(lane))
    return bool(excess.mean() > max(margin, 3 * standard_error(excess)))


def _general_cause(targets: Targets, hypotheses: Mapping[str, Floats], mean: float) -> str | None:
    """The nearest hypothesis, if it is within the floor, or within what the two lanes are apart, and at least twice as
    near as the column itself, which is `mean` nats away."""
    lanes = np.abs(targets.log_ratios("decode", "prefill")).mean()
    limit = min(MARGIN * max(targets.floor("prefill"), lanes), mean / 2)
    near = [(differences.mean(), phrase) for phrase, differences in hypotheses.items() if differences.mean() <= limit]
    return min(near)[1] if near else None


def _local_cause(off: Floats, limit: float, parts: Mapping[str, NDArray[np.bool_]]) -> str | None:
    """The smallest part without which the rest is within the limit, but not most of the tokens."""
    shares = [
        (part.mean(), phrase) for phrase, part in parts.items() if 0 < part.mean() <= 0.5 and off[~part].mean() <= limit
    ]
    return min(shares)[1] if shares else None


def _without_rows(rows: NDArray[np.intp]) -> str:
    more = f" and {len(rows) - _NAMED_ROWS:,} more" if len(rows) > _NAMED_ROWS else ""
    return f"without row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_NAMED_ROWS] + 1))}{more}"


def _most_beyond(off: Floats, positions: NDArray[np.int64]) -> str:
    """Name the position beyond which targets are at least twice as far as those before it, if there is one."""
    ratios = {}
    for number in np.unique(range_of(positions)).tolist()[1:]:
        is_before = positions < 2**number
        ratios[2**number] = off[~is_before].mean() / max(off[is_before].mean(), LEAST_FLOOR)
    position = max(ratios, key=lambda position: ratios[position], default=0)
    return f", most at positions beyond {position:,}" if ratios.get(position, 0) >= FAR_RANGE else ""
