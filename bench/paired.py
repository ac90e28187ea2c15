"""Ratios of measurements that were taken in pairs, with the interval that says how far to trust them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy.stats import ttest_1samp


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of ratios, and its 95 % confidence interval; a single pair has none."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:.3f}"
        low, high = self.interval
        return f"{self.mean:.3f} [{low:.3f}, {high:.3f}]"


def paired_ratio(values: Sequence[float], references: Sequence[float]) -> Ratio | None:
    """`values` over `references`, pair by pair; None if one of them is not positive.

    The interval is that of the mean of the ratios' logarithms, which are taken to be normally distributed.

    Raises:
        ValueError: there are no pairs, or one side has more.
    """
    pairs = list(zip(values, references, strict=True))
    if not pairs:
        raise ValueError("no pairs")
    if min(*values, *references) <= 0:
        return None
    logs = [math.log(value / reference) for value, reference in pairs]
    mean = math.exp(fmean(logs))
    if len(logs) == 1:
        return Ratio(mean, None)
    low, high = ttest_1samp(logs, 0).confidence_interval()
    return Ratio(mean, (math.exp(low), math.exp(high)))
