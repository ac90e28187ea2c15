"""McNemar's test, its interval, and the power that it has, against SciPy, statsmodels, and simulation."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm
from statsmodels.stats.contingency_tables import mcnemar

from scoremode.accuracy.flips import (
    Flips,
    exact_p,
    power,
    questions_needed,
    score_interval,
    smallest_difference_shown,
    task_figures,
)

TABLES = [Flips(200, 120, 14, 5), Flips(50, 20, 0, 9), Flips(1000, 640, 31, 31), Flips(14042, 9000, 300, 240)]


@pytest.mark.parametrize("flips", TABLES)
def test_p_is_that_of_the_exact_test(flips):
    assert exact_p(flips) == pytest.approx(mcnemar([[0, flips.lost], [flips.gained, 0]], exact=True).pvalue, abs=1e-9)


@pytest.mark.parametrize("flips", TABLES)
def test_ends_of_the_interval_are_just_not_rejected(flips):
    """The variance comes from the most likely shares of losses and gains that differ by an end, found by search."""
    n, kept = flips.num_questions, flips.num_questions - flips.lost - flips.gained

    def unlikeliness(lost: float, difference: float) -> float:
        shares = ((flips.lost, lost), (flips.gained, lost + difference), (kept, 1 - 2 * lost - difference))
        return -math.fsum(count * math.log(share) for count, share in shares if count)

    for difference in score_interval(flips):
        bounds = (max(0.0, -difference) + 1e-12, (1 - difference) / 2 - 1e-12)
        lost = minimize_scalar(
            unlikeliness, bounds=bounds, args=(difference,), method="bounded", options={"xatol": 1e-12}
        ).x
        stderr = math.sqrt((2 * lost + difference - difference**2) / n)
        assert abs(flips.difference - difference) / stderr == pytest.approx(norm.ppf(0.975), rel=1e-4)


def test_power_is_the_share_of_samples_in_which_a_difference_is_shown():
    rng = np.random.default_rng(0)
    num_flips = rng.binomial(600, 0.06, 1000)
    lost = rng.binomial(num_flips, 0.5 * (1 + 0.02 / 0.06))
    ps = [exact_p(Flips(600, 300, int(a), int(b))) for a, b in zip(lost, num_flips - lost, strict=True)]
    assert power(600, 0.06, 0.02) == pytest.approx(np.mean(np.array(ps) < 0.05), abs=3 * math.sqrt(0.25 / 1000))


def test_a_planted_loss_is_found_with_the_questions_that_are_needed():
    needed = questions_needed(0.01, 0.04)
    assert power(needed, 0.04, 0.01) >= 0.8 > power(round(0.95 * needed), 0.04, 0.01)
    assert smallest_difference_shown(needed, 0.04) == pytest.approx(0.01, rel=0.01)
    # Without flips so far: as many as the difference alone needs. Six are the fewest that show one.
    needed = questions_needed(0.01, 0.0)
    assert binom.sf(5, needed, 0.01) >= 0.8 > binom.sf(5, round(0.99 * needed), 0.01)


@pytest.mark.parametrize(
    ("flips", "verdict", "has_needed"),
    [
        (Flips(500, 300, 40, 10), "worse", False),
        (Flips(500, 300, 10, 40), "better", False),
        (Flips(500, 300, 20, 14), "too few questions", True),
        (Flips(14042, 9000, 160, 150), "no difference shown", False),
        (Flips(1, 1, 0, 0), "too few questions", True),
    ],
)
def test_the_verdict_says_whether_there_were_enough_questions(flips, verdict, has_needed):
    figures = task_figures(flips, 0.01)
    assert (figures.verdict, figures.num_needed is not None) == (verdict, has_needed)
    assert figures.interval[0] <= flips.difference <= figures.interval[1]
    if figures.num_needed:
        assert figures.num_needed > flips.num_questions
