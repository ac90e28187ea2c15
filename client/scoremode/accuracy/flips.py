"""Tests whether one of two models answers the same questions worse, and whether there are enough questions to show it.

A question counts if only one model answers it right: `lost` if that is the base, `gained` if it is the other model.

| figure | formula |
|---|---|
| p | exact McNemar: two-sided binomial test of lost among lost + gained, against one half |
| interval | Tango's score interval of (gained - lost) / n, 95 % (Statistics in Medicine 17, 1998) |
| smallest difference shown | the one that the exact test finds with 80 % power, at the observed rate of flips |
| adjusted p | Holm's, over the tasks of one comparison |
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import binom, binomtest

TaskVerdict = Literal["better", "worse", "no difference shown", "too few questions"]

LEVEL = 0.05
"""Significance level of the two-sided test."""
POWER = 0.8
_NEGLIGIBLE = 1e-9
"""`power` leaves out numbers of flips in both tails of their distribution. This is the probability of each tail."""


@dataclass(frozen=True, slots=True)
class Flips:
    """How often the base and another model answer the same questions right."""

    num_questions: int
    num_right: int
    """Questions that the base answers right."""
    lost: int
    gained: int

    @property
    def base_accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.num_right / self.num_questions

    @property
    def accuracy(self) -> float:
        """The other model's share of right answers."""
        return (self.num_right - self.lost + self.gained) / self.num_questions

    @property
    def difference(self) -> float:
        """The other model's accuracy minus the base's, -1 to 1."""
        return (self.gained - self.lost) / self.num_questions

    @property
    def rate(self) -> float:
        """Share of questions whose answer flips."""
        return (self.lost + self.gained) / self.num_questions


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """A model's figures on one task, or on the questions of all tasks."""

    flips: Flips
    p: float
    """The p-value of the exact test, adjusted for the number of tasks if there are several."""
    interval: tuple[float, float]
    smallest_shown: float
    """The smallest difference of accuracies, 0 to 1, that this number of questions shows with `POWER`."""
    verdict: TaskVerdict
    num_needed: int | None
    """How many questions would show the difference that `task_figures` was given, if there are too few; else None."""


def task_figures(flips: Flips, smallest_difference: float, p: float | None = None) -> TaskFigures:
    """Compute figures and a verdict: "too few questions" if no difference is shown, and `smallest_difference` (0 to 1)
    could not have been shown either. `p` replaces the test's own p-value."""
    p = exact_p(flips) if p is None else p
    smallest_shown = smallest_difference_shown(flips.num_questions, flips.rate)
    verdict: TaskVerdict = "worse" if flips.difference < 0 else "better"
    num_needed = None
    if p >= LEVEL:
        verdict = "no difference shown"
        if smallest_shown > smallest_difference:
            verdict = "too few questions"
            num_needed = questions_needed(smallest_difference, flips.rate)
    return TaskFigures(flips, p, score_interval(flips), smallest_shown, verdict, num_needed)


def exact_p(flips: Flips) -> float:
    """The p-value of the exact McNemar test, two-sided."""
    num_flips = flips.lost + flips.gained
    return float(binomtest(flips.lost, num_flips).pvalue) if num_flips else 1.0


def score_interval(flips: Flips) -> tuple[float, float]:
    """The 95 % interval of the difference of accuracies: the differences that Tango's score test does not reject."""
    n, lost, gained = flips.num_questions, flips.lost, flips.gained
    z = float(ndtri(1 - LEVEL / 2))

    def distance(difference: float) -> float:
        """How many standard errors the observed difference is from `difference`, minus z."""
        # The most likely rate of losses if `difference` is the true difference.
        linear = (2 * n + lost - gained) * difference - lost - gained
        root = math.sqrt(linear**2 + 8 * n * lost * difference * (1 - difference))
        rate = (root - linear) / (4 * n)
        variance = n * (2 * rate + difference * (1 - difference))
        observed = gained - lost - n * difference
        return abs(observed) / math.sqrt(variance) - z if variance > 0 else math.inf if observed else -z

    observed = flips.difference
    low = -1.0 if distance(-1.0) <= 0 else float(brentq(distance, -1.0, observed))
    high = 1.0 if distance(1.0) <= 0 else float(brentq(distance, observed, 1.0))
    return low, high


def power(num_questions: int, rate: float, difference: float) -> float:
    """The chance that the exact test shows a true difference of accuracies, if answers flip at `rate`."""
    lowest, highest = binom.ppf([_NEGLIGIBLE, 1 - _NEGLIGIBLE], num_questions, rate)
    num_flips = np.arange(lowest, highest + 1)
    # For each number of flips, the largest number of losses (or gains) that is small enough for p < LEVEL.
    most = binom.ppf(LEVEL / 2, num_flips, 0.5)
    most -= binom.cdf(most, num_flips, 0.5) >= LEVEL / 2
    one_way = 0.5 * (1 + difference / rate)
    shown = binom.cdf(most, num_flips, one_way) + binom.sf(num_flips - most - 1, num_flips, one_way)
    return float(binom.pmf(num_flips, num_questions, rate) @ shown)


@lru_cache(maxsize=256)
def smallest_difference_shown(num_questions: int, rate: float) -> float:
    """The smallest difference of accuracies that the test shows with `POWER`; 1 if it shows none.

    Answers flip at `rate`, or at the rate that the difference itself needs, if that is larger.
    """

    def surplus(difference: float) -> float:
        return power(num_questions, max(rate, difference), difference) - POWER

    return float(brentq(surplus, 1 / (1000 * num_questions), 1.0, xtol=1e-7)) if surplus(1.0) > 0 else 1.0


@lru_cache(maxsize=256)
def questions_needed(difference: float, rate: float) -> int:
    """The smallest number of questions, to three digits, that shows a difference of accuracies with `POWER`."""

    def is_shown(num_questions: int) -> bool:
        return smallest_difference_shown(num_questions, rate) <= difference

    most = next(filter(is_shown, (2**exponent for exponent in count(3))))
    candidates = range(most // 2, most + 1, max(1, most // 2048))
    return candidates[bisect_left(candidates, True, key=is_shown)]
