"""Tests whether a server diverges from a reference by more than the recorded model itself does.

For u units (segments of the text), with the sums P_r of a path's KL divergences and F_r of the recorded model's, in
each of R repeats:

    d_r       (sum P_r - sum F_r) / tokens
    excess    mean d_r
    variance  V_u + V_r: V_u, by unit, from the differences mean P_r - mean F_r; V_r = var(d_r) / R
    p         chance of such an excess if the true one is at most `MARGIN` of the floor: Student's t, one-sided, with
              Welch and Satterthwaite's degrees of freedom

V_r has what a whole run shares, because one run's noise is not another's. The effect of batches cancels in d_r, because
both runs of a pair have the same number of windows in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from scoremode.comparison.bootstrap import MIN_UNITS
from scoremode.kld import NEGLIGIBLE_KLD, Floats

MARGIN = 0.1
"""An excess of up to this share of the floor does not count: repeats on one server miss what differs between two."""
SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True)
class Excess:
    """How much a mean KL divergence exceeds its floor, in nats per token."""

    mean: float
    """The path's mean KL divergence, or the cost of its block, over its repeats."""
    floor: float
    """The default path's mean KL divergence, or the cost of the block there."""
    low: float | None
    """`low` and `high` are the 95 % interval of `mean - floor`; None if the text has too few units."""
    high: float | None
    p: float | None
    """None if the text has too few units, or the floor is infinite; 0 if only the path's divergence is infinite."""

    @property
    def value(self) -> float:
        return self.mean - self.floor


def excess(
    sums: Floats,
    floors: Floats,
    sizes: NDArray[np.integer],
    *,
    least_units: int = MIN_UNITS,
    least: float = NEGLIGIBLE_KLD,
) -> Excess:
    """Compare sums of divergences [repeats, units] with those of the floor in pairs; `sizes` [units] in tokens. The
    variance is that of the units alone if there is one repeat."""
    num_tokens, num_units, num_repeats = sizes.sum(), len(sizes), len(floors)
    mean, floor = (float(values.mean(axis=0).sum() / num_tokens) for values in (sums, floors))
    value = mean - floor
    if num_units < least_units or not math.isfinite(value):
        return Excess(mean, floor, None, None, 0.0 if value == math.inf else None)
    off = sums.mean(axis=0) - floors.mean(axis=0) - value * sizes
    by_unit = num_units / (num_units - 1) * (off**2).sum() / num_tokens**2
    differences = (sums - floors).sum(axis=1) / num_tokens
    by_repeat = differences.var(ddof=1) / num_repeats if num_repeats > 1 else 0.0
    margin = max(MARGIN * abs(floor), least)
    variance = by_unit + by_repeat
    if not variance:
        return Excess(mean, floor, value, value, float(value <= margin))
    freedom = variance**2 / (by_unit**2 / (num_units - 1) + by_repeat**2 / max(num_repeats - 1, 1))
    error = math.sqrt(variance)
    half = float(stdtrit(freedom, 0.975)) * error
    return Excess(mean, floor, value - half, value + half, float(stdtr(freedom, (margin - value) / error)))


def significant(tests: Sequence[Excess]) -> list[bool]:
    """Tell which excesses are more than chance, over all tests of a table (Holm's method). One without a p never is."""
    from statsmodels.stats.multitest import multipletests

    p_values = [1.0 if test.p is None else test.p for test in tests]
    return [*map(bool, multipletests(p_values, SIGNIFICANCE, "holm")[0])] if p_values else []
