"""What the 95 % intervals of `ppl-client compare` cover, on made-up data whose truth is known.

    python bench/interval_coverage.py --trials 1000

Each trial makes up a text's NLLs for two models, and checks whether two intervals hold the truth: the one that treats
tokens as independent, mean ± 1.96 s / sqrt(n), and the block bootstrap's. It does so for the mean NLL of the first
model and for the difference of the second from it, whose truth is 0.

The NLL of a token is exponential, and from one token to the next its normal score is AR(1). Each window has a level
that its NLLs are multiplied by; levels may depend on the window before, as AR(1), like a text's chapters. The
difference of the models is made in the same way: a noise that is AR(1), and a level for each window.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import log_ndtr
from tables import table

from scoremode.comparison.bootstrap import resample
from scoremode.kld import standard_error

Floats = NDArray[np.float64]

WINDOW_SIZE = 128
TRUE_MEAN = 3.0
DIFFERENCE = 0.1
"""Deviation of the difference of a token's two NLLs."""
_Z_975 = 1.959964
INTERVALS = ("NLL, independent", "NLL, blocks", "difference, independent", "difference, blocks")
NUMBERS_OF_WINDOWS = (10, 20, 30, 50, 100, 300, 600)


@dataclass(frozen=True, slots=True)
class Dependence:
    """How alike neighbors are."""

    name: str
    tokens: float
    """Correlation of a token with the next."""
    level: float
    """Deviation of the logarithm of a window's level."""
    levels: float = 0.0
    """Correlation of a window's level with the next."""


DEPENDENCES = (
    Dependence("none", 0, 0),
    Dependence("weak", 0.5, 0.1),
    Dependence("middle", 0.8, 0.2),
    Dependence("strong", 0.9, 0.4),
    Dependence("levels run on, 0.3", 0.8, 0.4, 0.3),
    Dependence("levels run on, 0.6", 0.8, 0.4, 0.6),
)


def made_up(rng: np.random.Generator, dependence: Dependence, num_windows: int) -> tuple[Floats, Floats]:
    """NLLs of two equal models, [windows * WINDOW_SIZE] each: the truth is `TRUE_MEAN`, and a difference of 0."""
    num_tokens, spread = num_windows * WINDOW_SIZE, dependence.level
    scores = _ar1(rng, num_tokens, dependence.tokens)
    levels = np.exp(spread * _ar1(rng, num_windows, dependence.levels) - spread**2 / 2)
    first = -TRUE_MEAN * log_ndtr(scores) * np.repeat(levels, WINDOW_SIZE)
    noise = _ar1(rng, num_tokens, dependence.tokens)
    shifts = spread * _ar1(rng, num_windows, dependence.levels)
    return first, first + DIFFERENCE * (noise + np.repeat(shifts, WINDOW_SIZE))


def _ar1(rng: np.random.Generator, number: int, correlation: float) -> Floats:
    """Standard normal values of a stationary AR(1)."""
    shocks = rng.normal(size=number) * math.sqrt(1 - correlation**2)
    shocks[0] = rng.normal()
    values: Floats = lfilter([1.0], [1.0, -correlation], shocks)
    return values


def measure(dependence: Dependence, num_windows: int, num_trials: int, *, num_resamples: int, seed: int) -> Floats:
    """The share of `num_trials` texts whose intervals hold the truth, for each of `INTERVALS`."""
    held = np.zeros(len(INTERVALS))
    sizes = np.full(num_windows, WINDOW_SIZE, np.int32)
    for rng in np.random.default_rng([seed, num_windows]).spawn(num_trials):
        first, second = made_up(rng, dependence, num_windows)
        difference = second - first
        series = np.column_stack([first, difference])
        found = resample(series, series, sizes, num_resamples=num_resamples, seed=int(rng.integers(2**32)))
        held += (
            _holds(_independent(first), TRUE_MEAN),
            _holds(found.interval(first.mean(), found.means[:, 0]), TRUE_MEAN),
            _holds(_independent(difference), 0),
            _holds(found.interval(difference.mean(), found.means[:, 1]), 0),
        )
    return held / num_trials


def _independent(values: Floats) -> tuple[float, float]:
    half = _Z_975 * standard_error(values)
    return values.mean() - half, values.mean() + half


def _holds(interval: tuple[float, float] | tuple[None, None], truth: float) -> bool:
    low, high = interval
    return low is not None and high is not None and low <= truth <= high


def _rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    for dependence in DEPENDENCES:
        for windows in arguments.windows:
            found = measure(
                dependence, windows, arguments.trials, num_resamples=arguments.resamples, seed=arguments.seed
            )
            row = [dependence.name, str(windows), *(f"{share:.1%}" for share in found)]
            print(*row, file=sys.stderr, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, nargs="+", default=NUMBERS_OF_WINDOWS)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    print(table(("dependence", "windows", *INTERVALS), list(_rows(parser.parse_args()))))


if __name__ == "__main__":
    main()
