"""Stores the lane of a run, and compares two lanes: whether and how much they differ, and from which position on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scoremode.kld import Floats, standard_error
from scoremode.wire import Lane

LEAST_DIFFERENCE = 0.001
"""A smaller difference of lanes is rounding, in nats: 0.1 % of a perplexity."""


def mean_batch(batches: Iterable[float | None]) -> float | None:
    means = [batch for batch in batches if batch is not None]
    return sum(means) / len(means) if means else None


def lane_fields(lane: Lane, batch: float | None = None) -> dict[str, object]:
    """The lane's fields in a journal's header and a run's settings; none for prefill."""
    if lane == "prefill":
        return {}
    return {"lane": lane} if batch is None else {"lane": lane, "mean_batch": batch}


def in_lane(name: str, lane: Lane) -> str:
    """The label of a run: the model's name, with the lane unless it is prefill."""
    return name if lane == "prefill" else f"{name} ({lane})"


@dataclass(frozen=True, slots=True)
class LaneDifference:
    """How a lane differs from prefill at the same targets: its NLLs or KL divergences minus prefill's, in nats."""

    mean: float
    mean_absolute: float
    by_position: list[tuple[int, int, float]]
    """(first position, position after the last, mean difference) of ranges that double in length."""
    differs_from: int | None
    """Position from which on every range differs, or the first if only the overall mean does; None for agreement."""

    def verdict(self, lane: Lane = "decode") -> str:
        if math.isnan(self.mean):
            return f"{lane} cannot be compared with prefill: no value is finite in both"
        if self.differs_from is None:
            absolute = f"{self.mean_absolute:.5f} in the mean of absolute values"
            return f"{lane} agrees with prefill: {self.mean:+.5f} nats in the mean, {absolute}"
        last = self.by_position[-1][2]
        drifts = len(self.by_position) > 1 and abs(last) > 2 * abs(self.by_position[0][2]) and self.differs_from > 1
        growth = f", and {last:+.5f} at the end: a difference that grows with the position comes from the KV cache"
        where = f"from position {self.differs_from} on{growth if drifts else ''}"
        return f"{lane} differs from prefill: {self.mean:+.5f} nats in the mean, {where}"


def range_of(positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """The number k of each position's range, [2^k, 2^(k+1)); positions are at least 1."""
    octaves: NDArray[np.int64] = np.log2(positions).astype(int)
    return octaves


def lane_difference(
    prefill: NDArray[np.floating],
    decode: NDArray[np.floating],
    positions: NDArray[np.integer],
    least: float = LEAST_DIFFERENCE,
) -> LaneDifference:
    """Compare two lanes of one server, or two servers, given the NLLs or KL divergences [n] of the same targets in
    nats, and the targets' positions [n] in their windows, at least 1. Targets with an infinite value in either are left
    out. A difference of at most `least` nats is none."""
    finite = np.isfinite(prefill) & np.isfinite(decode)
    off, positions = np.asarray(decode, np.float64)[finite] - prefill[finite], positions[finite]
    if not finite.any():
        return LaneDifference(math.nan, math.nan, [], None)
    octaves = range_of(positions)
    ranges, significant = [], []
    for octave in np.unique(octaves).tolist():
        part = off[octaves == octave]
        ranges.append((2**octave, min(2 ** (octave + 1), int(positions.max()) + 1), float(part.mean())))
        significant.append(_is_different(part, least))
    differs_from = None
    if _is_different(off, least) or significant[-1]:
        # `count` is the number of ranges at the end that all differ; 0 if only the overall mean differs.
        count = next((index for index, differs in enumerate(reversed(significant)) if not differs), len(significant))
        differs_from = ranges[-count][0] if count else ranges[0][0]
    return LaneDifference(float(off.mean()), float(np.abs(off).mean()), ranges, differs_from)


def _is_different(off: Floats, least: float) -> bool:
    """Whether the mean exceeds `least` and three standard errors."""
    return len(off) > 1 and bool(abs(off.mean()) > max(least, 3 * standard_error(off)))
