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
from pydantic import BaseModel, ConfigDict

from scoremode.kld import Floats, quantile, standard_error, times_the_floor
from scoremode.runs.rollouts import Source
from scoremode.wire import Lane

CLIP = 0.2
"""A ratio leaves 1 ± this."""
SUMS = ("count", "sum", "squares", "absolute", "k3", "clipped", "ratios", "squared_ratios", "largest")
"""The figures of a sequence from which those of all sequences are computed: all but the last are sums."""
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


@np.errstate(over="ignore", invalid="ignore")
def sums_of(log_ratios: Floats) -> Floats:
    """The `SUMS` of a sequence's log ratios [n]."""
    off, ratios, absolute = np.expm1(log_ratios), np.exp(log_ratios), np.abs(log_ratios)
    return np.array(
        [
            len(log_ratios),
            log_ratios.sum(),
            np.square(log_ratios).sum(),
            absolute.sum(),
            (off - log_ratios).sum(),
            (np.abs(off) > CLIP).sum(),
            ratios.sum(),
            np.square(ratios).sum(),
            absolute.max(),
        ]
    )


@np.errstate(over="ignore", invalid="ignore")
def figures(sums: Floats, absolute: Floats, threshold: float) -> dict[str, float]:
    """Figures of sequences whose tokens have the log ratios ln q - ln p; docs/parity.md has their formulas.

    Args:
        sums: The `SUMS` of each sequence [sequences, 9].
        absolute: Absolute log ratios [n], for quantiles.
        threshold: A ratio is beyond it if it is outside [1 / threshold, threshold].
    """
    counts, log_weights, squares, distances, k3, clipped, ratios, squared_ratios, largest = sums.T
    num_tokens, ordered = counts.sum(), np.sort(absolute)
    weights = np.exp(log_weights - log_weights.max())
    return {
        "num_tokens": num_tokens,
        "mean": log_weights.sum() / num_tokens,
        "mean_absolute": distances.sum() / num_tokens,
        **{name: quantile(ordered, fraction) for name, fraction in _QUANTILES.items()},
        "largest": largest.max(),
        "k1": -log_weights.sum() / num_tokens,
        "k2": squares.sum() / num_tokens / 2,
        "k3": k3.sum() / num_tokens,
        "ratio_share": clipped.sum() / num_tokens,
        "ess_tokens": (np.square(ratios) / (counts * squared_ratios)).mean(),
        "ess_batch": weights.sum() ** 2 / (len(weights) * np.square(weights).sum()),
        "masked_by_mean": (np.abs(log_weights / counts) > math.log(threshold)).mean(),
        "masked_by_token": (largest > math.log(threshold)).mean(),
    }


def range_of(positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """The number k of each position's range, [2^k, 2^(k+1)); position 0 is in the first."""
    octaves: NDArray[np.int64] = np.log2(np.maximum(positions, 1)).astype(int)
    return octaves


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The targets of evenly spaced rows: arrays [n]."""

    rows: NDArray[np.int64]
    """The index of each target's row in the file, ascending."""
    positions: NDArray[np.int64]
    """How many tokens come before each target."""
    classes: NDArray[np.int64]
    logprobs: dict[str, Floats]
    """The logprobs of each column, and of each lane in two runs, by name."""

    def log_ratios(self, pair: str) -> Floats:
        """ln q - ln p of each target, for a pair such as `trainer / prefill`."""
        q, p = pair.split(" / ")
        return self.logprobs[q] - self.logprobs[p]

    def floors(self, lane: Lane) -> Floats:
        """How far each target's logprobs in the two runs are apart."""
        return np.abs(self.log_ratios(f"{lane}{AGAIN} / {lane}"))

    def floor(self, lane: Lane) -> float:
        return max(float(self.floors(lane).mean()), LEAST_FLOOR)


class Finding(BaseModel):
    """Whether a column is what the server computes in the nearer lane."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    source: Source
    lane: Lane
    mean_absolute: float
    floor: float
    """In nats, at least `LEAST_FLOOR`."""
    is_within: bool
    cause: str | None
    """The change that brings the column within the floor; None if none does, or none is needed."""
    sentence: str


def shifted(sample: Sample, source: Source) -> dict[str, Floats]:
    """Absolute differences of a column from logprobs of the tokens next to its own, by what this would mean."""
    column, lane = sample.logprobs[source], sample.logprobs["prefill"]
    is_next = np.diff(sample.rows) == 0
    pairs = {"next token": column[:-1] - lane[1:], "token before": column[1:] - lane[:-1]}
    return {
        f"if each logprob is that of the {token}: they are shifted by one": np.abs(off[is_next])
        for token, off in pairs.items()
        if is_next.any()
    }


def judge(source: Source, sums: Mapping[Lane, Floats], sample: Sample, hypotheses: Mapping[str, Floats]) -> Finding:
    """Compare a column with both lanes, given the `SUMS` of each row in each lane [rows, 9]. If it is not within the
    floor of the nearer lane, name what brings it back there, such as the nearest of `hypotheses`, which have absolute
    differences of targets."""
    means = {lane: _mean(rows) for lane, rows in sums.items()}
    lane: Lane = "decode" if source == "sampler" else "prefill"
    if means[lane] > MARGIN * sample.floor(lane):
        lane = min(means, key=lambda lane: means[lane])
    rows, floor, is_far_row = sums[lane], sample.floor(lane), _far_rows(sums[lane], sample, lane)
    off, ranges = np.abs(sample.log_ratios(f"{source} / {lane}")), range_of(sample.positions)
    far_ranges = [number for number in np.unique(ranges).tolist() if _is_far(off, ranges == number, sample, lane)]
    is_within = means[lane] <= MARGIN * floor and not is_far_row.any() and not far_ranges
    cause = None
    if not is_within:
        is_near = ~np.isin(ranges, far_ranges)
        parts = [
            (1 - rows[~is_far_row, 0].sum() / rows[:, 0].sum(), _mean(rows[~is_far_row]), _without_rows(is_far_row)),
            (
                1 - is_near.mean(),
                off[is_near].sum() / max(is_near.sum(), 1),
                f"without positions {', '.join(map(range_in_words, far_ranges))}",
            ),
        ]
        # The smallest part without which the rest is within the floor, but not most of the tokens.
        local = min((part for part in parts if 0 < part[0] <= 0.5 and part[1] <= MARGIN * floor), default=None)
        cause = _general_cause(sample, hypotheses, means[lane]) or (local and local[2])
    times = f"{times_the_floor(means[lane] / floor)} the floor"
    if is_within:
        sentence = f"the {source} is the {lane} lane (within the floor)"
    elif cause is not None:
        sentence = f"the {source} is {times} away from the {lane} lane, and within the floor {cause}"
    elif (sample.log_ratios(f"{source} / {lane}") > -FAR_ROW * floor).mean() > _ONE_SIDED:
        cause = "its logprobs are normalized over a part of the vocabulary, as by top-k or top-p"
        sentence = (
            f"the {source} is {times} above the {lane} lane and nowhere below it: {cause}, so figures mean nothing"
        )
    else:
        sentence = f"the {source} is {times} away from the {lane} lane{_most_beyond(off, sample.positions)}"
    return Finding(
        source=source,
        lane=lane,
        mean_absolute=means[lane],
        floor=floor,
        is_within=is_within,
        cause=cause,
        sentence=sentence,
    )


def _mean(rows: Floats) -> float:
    """The mean absolute difference of all tokens, given the `SUMS` of their rows."""
    return float(rows[:, SUMS.index("absolute")].sum() / max(rows[:, 0].sum(), 1))


def _far_rows(rows: Floats, sample: Sample, lane: Lane) -> NDArray[np.bool_]:
    _, indices, counts = np.unique(sample.rows, return_inverse=True, return_counts=True)
    largest = (np.bincount(indices, sample.floors(lane)) / counts).max()
    is_far: NDArray[np.bool_] = rows[:, SUMS.index("absolute")] / rows[:, 0] > FAR_ROW * max(largest, LEAST_FLOOR)
    return is_far


def _is_far(off: Floats, members: NDArray[np.bool_], sample: Sample, lane: Lane) -> bool:
    """Whether the members are so far from a lane that it is not chance, given the distances of all targets."""
    floors = sample.floors(lane)[members]
    excess = off[members] - floors
    margin = (FAR_RANGE - 1) * max(float(floors.mean()), sample.floor(lane))
    return bool(excess.mean() > max(margin, 3 * standard_error(excess)))


def _general_cause(sample: Sample, hypotheses: Mapping[str, Floats], mean: float) -> str | None:
    """The nearest hypothesis, if it is within the floor, or within what the two lanes are apart, and at least twice as
    near as the column itself, which is `mean` nats away."""
    lanes = np.abs(sample.log_ratios("decode / prefill")).mean()
    distances = {phrase: float(differences.mean()) for phrase, differences in hypotheses.items()}
    nearest = min(distances, key=lambda phrase: distances[phrase], default="")
    limit = min(MARGIN * max(sample.floor("prefill"), lanes), mean / 2)
    return nearest if distances.get(nearest, np.inf) <= limit else None


def _without_rows(is_far: NDArray[np.bool_]) -> str:
    numbers = (np.flatnonzero(is_far) + 1).tolist()
    more = f" and {len(numbers) - _NAMED_ROWS:,} more" if len(numbers) > _NAMED_ROWS else ""
    return f"without row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_NAMED_ROWS]))}{more}"


def range_in_words(number: int) -> str:
    """The positions of a range, as `range_of` numbers them."""
    return f"{2**number if number else 0:,} to {2 ** (number + 1) - 1:,}"


def _most_beyond(off: Floats, positions: NDArray[np.int64]) -> str:
    """Name the position beyond which targets are at least twice as far as those before it, if there is one."""
    ratios = {}
    for number in np.unique(range_of(positions)).tolist()[1:]:
        is_before = positions < 2**number
        ratios[2**number] = off[~is_before].mean() / max(off[is_before].mean(), LEAST_FLOOR)
    position = max(ratios, key=lambda position: ratios[position], default=0)
    return f", most at positions beyond {position:,}" if ratios.get(position, 0) >= FAR_RANGE else ""
