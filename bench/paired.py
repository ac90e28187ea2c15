"""Ratios of measurements that were taken in pairs, with the interval that says how far to trust them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

STUDENT_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantile of Student's t for 1, 2, ... degrees of freedom. Beyond 30 the last stands in, too large by 4 % at
most."""


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
    mean = fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None)
    quantile = STUDENT_T_975[min(len(logs) - 1, len(STUDENT_T_975)) - 1]
    half = quantile * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), (math.exp(mean - half), math.exp(mean + half)))
