"""Computes intervals that stay valid if neighboring tokens depend on each other, by a stationary block bootstrap over
the windows of a text, or by drawing documents one by one.

docs/compare.md describes the method. For n units (windows or documents), blocks of b units on average, q = 1 - 1/b,
and s the standard deviation of a figure over the resamples, the figure's 95 % interval is

    value ± t(f) · s · sqrt(1 / (1 - (1 + q) / (1 - q) / n)),    f = n (1 - q²) / (1 + q²) - 1

t(f) is the 97.5 % quantile of Student's t distribution with f degrees of freedom. For documents, b is 1, and n is the
equivalent number of documents of equal size: (Σ size)² / Σ size².
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

from scoremode.kld import Floats

MIN_UNITS = 20
"""The fewest units for an interval; fewer units do not have enough blocks."""
FEW_WINDOWS = 40
"""A text with fewer windows is cut into at least this many segments, if it is long enough."""
ROUNDING = 1e-12
"""Resamples with a smaller spread, in nats or shares, are equal except for rounding in their sums."""
MANY_UNITS = 2000
"""More windows than this are joined into groups: more units would only take longer, and not improve an interval."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The parts of a text that resamples draw. Each has consecutive targets, which are scored tokens."""

    starts: NDArray[np.intp]
    """[units], the index of each unit's first target."""
    sizes: NDArray[np.intp]
    """[units], the number of targets in each unit."""
    name: str
    are_documents: bool = False

    def sums(self, values: Floats) -> Floats:
        """Sum values [targets, ...] over each unit, to [units, ...]."""
        return np.add.reduceat(values, self.starts)


def cut_units(window_sizes: NDArray[np.int32], window_documents: NDArray[np.int32] | None = None) -> Units:
    """Cut a text into units: its documents if it has any, else windows, segments of few windows, or groups of many."""
    sizes = window_sizes[window_sizes > 0].astype(np.intp)
    if window_documents is not None:
        sizes = np.add.reduceat(sizes, np.flatnonzero(np.diff(window_documents[window_sizes > 0], prepend=-1)))
        return Units(np.cumsum(sizes) - sizes, sizes, "documents", are_documents=True)
    name = "windows"
    if len(sizes) < FEW_WINDOWS:
        name = "segments of windows"
        num_segments = -(-FEW_WINDOWS // len(sizes))
        # Cut each window into segments of at least sixteen tokens, whose sizes differ by at most one.
        parts = [max(1, min(num_segments, size // 16)) for size in sizes]
        ends = [np.linspace(0, size, num + 1).astype(np.intp) for size, num in zip(sizes, parts, strict=True)]
        sizes = np.concatenate([np.diff(window_ends) for window_ends in ends])
    elif len(sizes) > MANY_UNITS:
        num_joined = -(-len(sizes) // MANY_UNITS)
        name = f"groups of {num_joined} windows"
        sizes = np.add.reduceat(sizes, np.arange(0, len(sizes), num_joined))
    return Units(np.cumsum(sizes) - sizes, sizes, name)


@dataclass(frozen=True, slots=True, eq=False)
class Resamples:
    """Means of several series of values over the same resamples."""

    means: Floats
    """[resamples, series]."""
    blocks: str
    """How the resamples were drawn, or why there are none, as a phrase."""
    factor: float
    """Half the interval's width divided by the standard deviation over the resamples."""

    def interval(self, value: float, resampled: Floats) -> tuple[float, float] | tuple[None, None]:
        """The 95 % interval of a figure, given its value for the text, and its values `resampled` [resamples].

        None and None if there are too few units, a value is infinite, or all resamples are equal, because these do not
        show how much the figure varies.
        """
        half = self._half(resampled)
        return (value - half, value + half) if math.isfinite(half) and half else (None, None)

    def share_interval(
        self, share: float, resampled: Floats, num_targets: int
    ) -> tuple[float, float] | tuple[None, None]:
        """The 95 % interval of a share of targets: at each end the wider of `interval` and the exact interval.

        The exact interval is for the number of independent targets that would give the share the resamples' variance,
        at most `num_targets`. If all resamples are equal, it is for `num_targets`.
        """
        half = self._half(resampled)
        if not math.isfinite(half):
            return None, None
        variance = (half / ndtri(0.975)) ** 2
        size = min(num_targets, share * (1 - share) / variance) if half else num_targets
        low, high = exact_interval(share, size)
        return min(low, max(share - half, 0.0)), max(high, min(share + half, 1.0))

    def _half(self, resampled: Floats) -> float:
        """Half of the interval's width: 0 if all resamples are equal, NaN if there is no interval."""
        spread = float(np.std(resampled)) if np.isfinite(resampled).all() else math.nan
        return self.factor * (0.0 if spread < ROUNDING else spread)


def exact_interval(share: float, size: float) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval for a share of `size` independent trials; `size` may be a fraction."""
    hits, misses = share * size, (1 - share) * size
    low = float(betaincinv(hits, misses + 1, 0.025)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, misses, 0.975)) if misses > 0 else 1.0
    return low, high


def resample(
    series: Floats,
    watched: Floats,
    window_sizes: NDArray[np.int32],
    window_documents: NDArray[np.int32] | None = None,
    groups: Sequence[NDArray[np.bool_]] = (),
    *,
    num_resamples: int,
    seed: int,
) -> list[Resamples]:
    """Resample a text, and return the means of `series`, [targets, series]: over the text first, then over each group.

    Blocks are as long as the column of `watched`, [targets, figures], that needs the longest ones. `window_documents`
    has each window's document, [windows], not decreasing. A group is a mask [targets]; the means of all groups are over
    the same resamples.
    """
    units = cut_units(window_sizes, window_documents)
    num_units = len(units.sizes)
    if num_units < MIN_UNITS:
        reason = f"a text of {num_units} {units.name} is too short"
        if units.are_documents:
            reason = f"windows of one document are not independent, and {num_units} documents are too few"
        nothing = np.full((num_resamples, series.shape[1]), math.nan)
        return [Resamples(nothing, f"no intervals: {reason}", math.nan)] * (1 + len(groups))
    length = 1 if units.are_documents else block_length(units, watched)
    words = f"stationary blocks of {length} on average, of {num_units:,} {units.name}"
    if units.are_documents:
        words = f"{num_units:,} documents drawn one by one"
    sums = np.hstack([units.sums(series), *(units.sums(np.where(group[:, None], series, 0)) for group in groups)])
    sizes = np.column_stack([units.sizes, *(units.sums(group.astype(np.float64)) for group in groups)])
    # NaN is expected for a series with an infinite value (0 times infinity), and for a group in a resample without any
    # of its targets. Other series are not affected.
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.empty((num_resamples, 1 + len(groups), series.shape[1]))
        for row, counts in enumerate(unit_counts(num_units, length, num_resamples, seed)):
            means[row] = (counts @ sums).reshape(means.shape[1:]) / (counts @ sizes)[:, None]
    factors = [_factor(part_sizes[part_sizes > 0], length, units.are_documents) for part_sizes in sizes.T]
    return [Resamples(means[:, place], words, factor) for place, factor in enumerate(factors)]


def unit_counts(num_units: int, length: int, num_resamples: int, seed: int) -> Iterator[Floats]:
    """Yield for each resample how often each unit is drawn, [units]."""
    # Imported here because this takes five seconds, and errors in files are shown before.
    from arch.bootstrap import StationaryBootstrap

    bootstrap = StationaryBootstrap(length, np.arange(num_units), seed=np.random.default_rng(seed))
    for (drawn,), _ in bootstrap.bootstrap(num_resamples):
        yield np.bincount(drawn, minlength=num_units).astype(np.float64)


def _factor(sizes: Floats, length: int, are_documents: bool) -> float:
    """The factor of `Resamples` for units of these sizes, [units] targets; NaN if there are too few units."""
    if len(sizes) < MIN_UNITS:
        return math.nan
    num_units = float(sizes.sum() ** 2 / np.square(sizes).sum()) if are_documents else len(sizes)
    decay = 1 - 1 / length
    freedom = num_units * (1 - decay**2) / (1 + decay**2) - 1
    lost = (1 + decay) / (1 - decay) / num_units
    return float(stdtrit(freedom, 0.975)) / math.sqrt(1 - lost)


def block_length(units: Units, watched: Floats) -> int:
    """Choose the mean length of blocks, in units, from the series `watched`, [targets, figures].

    The mean length is twice that with the smallest error of s (`arch.bootstrap.optimal_block_length`): short blocks
    make an interval too narrow, while t(f) corrects for few blocks. It is at least the cube root of the number of
    units, for dependence that the estimate misses, and at most a quarter of that number.
    """
    from arch.bootstrap import optimal_block_length

    num_units = len(units.sizes)
    lengths: list[float] = [num_units ** (1 / 3)]
    finite = watched[:, np.isfinite(watched).all(axis=0)]
    deviations = units.sums(finite - finite.mean(axis=0))
    varying = deviations[:, deviations.std(axis=0) > 0]
    if varying.shape[1]:
        wanted = optimal_block_length(varying)["stationary"].to_numpy()
        lengths += list(2 * wanted[np.isfinite(wanted)])
    return min(math.ceil(max(lengths)), num_units // 4)
