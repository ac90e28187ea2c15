"""Measure how often the 95 % intervals of `ppl-client compare` cover the truth, on made-up data.

    python bench/interval_coverage.py --trials 1000

Each trial makes up a text's NLLs for two models, and checks whether two intervals hold the truth: the one that treats
tokens as independent, mean ± 1.96 s / sqrt(n), and the block bootstrap's. It does so for the mean NLL of the first
model and for the difference of the second from it, whose truth is 0.

The NLL of a token is exponential, and from one token to the next its normal score is AR(1). Each window has a level
that its NLLs are multiplied by; levels may depend on the window before, as AR(1), like a text's chapters. The
difference of the models is made in the same way: a noise that is AR(1), and a level for each window.

Of a text with documents, levels of one document's windows are alike, and documents are independent. Besides blocks of
windows, as if there were no documents, these texts have two more intervals: by blocks of documents, and by documents
drawn one by one, which is what Scoremode does.
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
DOCUMENT_INTERVALS = tuple(
    f"{of}, {how}" for how in ("blocks of documents", "documents") for of in ("NLL", "difference")
)
NUMBERS_OF_WINDOWS = (10, 20, 30, 50, 100, 300, 600)
NUMBERS_OF_DOCUMENTS = (20, 50, 100, 300)
WINDOWS_PER_DOCUMENT = 4


@dataclass(frozen=True, slots=True)
class Dependence:
    """How alike neighbors are."""

    name: str
    tokens: float
    """Correlation of a token with the next."""
    level: float
    """Deviation of the logarithm of a window's level."""
    levels: float = 0.0
    """Correlation of a window's level with the next; in a document, with each other."""
    document_spread: float | None = None
    """Deviation of the logarithm of a document's length, four windows on average; None for a text without documents."""
    num_domains: int = 1
    """Domains that documents are drawn from and sorted by; if several, half of what documents differ by is theirs."""


DEPENDENCES = (
    Dependence("none", 0, 0),
    Dependence("weak", 0.5, 0.1),
    Dependence("middle", 0.8, 0.2),
    Dependence("strong", 0.9, 0.4),
    Dependence("levels run on, 0.3", 0.8, 0.4, 0.3),
    Dependence("levels run on, 0.6", 0.8, 0.4, 0.6),
    Dependence("documents", 0.8, 0.4, 0.5, document_spread=0.5),
    Dependence("documents of very different lengths", 0.8, 0.4, 0.5, document_spread=1.2),
    Dependence("documents sorted by domain", 0.8, 0.4, 0.5, document_spread=0.5, num_domains=4),
)


def made_up(
    rng: np.random.Generator, dependence: Dependence, num_units: int
) -> tuple[Floats, Floats, NDArray[np.int32] | None]:
    """NLLs of two equal models, [windows * WINDOW_SIZE] each: the truth is `TRUE_MEAN`, and a difference of 0; and
    [windows], the document of each, for a dependence that has `num_units` documents instead of windows."""
    documents, domains = None, np.zeros(num_units, np.intp)
    if dependence.document_spread is not None:
        # Its median is such that the mean is WINDOWS_PER_DOCUMENT, up to rounding.
        median = math.log(WINDOWS_PER_DOCUMENT - 0.5) - dependence.document_spread**2 / 2
        lengths = np.ceil(rng.lognormal(median, dependence.document_spread, num_units)).astype(np.intp)
        documents = np.repeat(np.arange(num_units, dtype=np.int32), lengths)
        domains = np.sort(rng.integers(dependence.num_domains, size=num_units))
    num_windows = num_units if documents is None else len(documents)
    num_tokens, spread = num_windows * WINDOW_SIZE, dependence.level
    scores = _ar1(rng, num_tokens, dependence.tokens)
    level_scores, mean = _levels(rng, dependence, documents, domains, num_windows)
    first = -TRUE_MEAN * log_ndtr(scores) * np.repeat(np.exp(spread * level_scores) / mean, WINDOW_SIZE)
    noise = _ar1(rng, num_tokens, dependence.tokens)
    shifts = spread * _levels(rng, dependence, documents, domains, num_windows)[0]
    return first, first + DIFFERENCE * (noise + np.repeat(shifts, WINDOW_SIZE)), documents


def _levels(
    rng: np.random.Generator,
    dependence: Dependence,
    documents: NDArray[np.int32] | None,
    domains: NDArray[np.intp],
    num_windows: int,
) -> tuple[Floats, float]:
    """[windows] scores with a mean of 0 and a deviation of 1, and the mean of exp(level * score)."""
    if documents is None:
        return _ar1(rng, num_windows, dependence.levels), math.exp(dependence.level**2 / 2)
    num_domains = dependence.num_domains
    between = dependence.levels / 2 if num_domains > 1 else 0.0
    places = np.arange(num_domains) - (num_domains - 1) / 2
    of_domains = math.sqrt(between) * places / (places.std() or 1)
    of_documents = rng.normal(size=len(domains)) * math.sqrt(dependence.levels - between)
    own = rng.normal(size=num_windows) * math.sqrt(1 - dependence.levels)
    mean = math.exp(dependence.level**2 * (1 - between) / 2) * np.exp(dependence.level * of_domains).mean()
    return (of_domains[domains] + of_documents)[documents] + own, float(mean)


def _ar1(rng: np.random.Generator, number: int, correlation: float) -> Floats:
    """Standard normal values of a stationary AR(1)."""
    shocks = rng.normal(size=number) * math.sqrt(1 - correlation**2)
    shocks[0] = rng.normal()
    values: Floats = lfilter([1.0], [1.0, -correlation], shocks)
    return values


def measure(
    dependence: Dependence, num_units: int, num_trials: int, *, num_resamples: int = 500, seed: int = 0
) -> Floats:
    """The share of `num_trials` texts whose intervals hold the truth, for each of `INTERVALS`, and for each of
    `DOCUMENT_INTERVALS` if the text has documents."""
    held: list[list[bool]] = []
    for rng in np.random.default_rng([seed, num_units]).spawn(num_trials):
        first, second, documents = made_up(rng, dependence, num_units)
        series = np.column_stack([first, second - first])
        windows = np.full(len(first) // WINDOW_SIZE, WINDOW_SIZE, np.int32)
        kinds: list[tuple[NDArray[np.int32], NDArray[np.int32] | None]] = [(windows, None)]
        if documents is not None:
            kinds += [(WINDOW_SIZE * np.bincount(documents).astype(np.int32), None), (windows, documents)]
        drawn_with = int(rng.integers(2**32))
        by_kind = []
        for sizes, of_documents in kinds:
            [found] = resample(series, series, sizes, of_documents, num_resamples=num_resamples, seed=drawn_with)
            intervals = [found.interval(float(series[:, column].mean()), found.means[:, column]) for column in (0, 1)]
            by_kind.append([_holds(*each) for each in zip(intervals, (TRUE_MEAN, 0), strict=True)])
        independent = [_holds(_independent(first), TRUE_MEAN), _holds(_independent(second - first), 0)]
        (blocks, difference_blocks), *of_documents_kinds = by_kind
        row = [independent[0], blocks, independent[1], difference_blocks]
        held.append(row + [each for kind in of_documents_kinds for each in kind])
    shares: Floats = np.mean(held, axis=0)
    return shares


def _independent(values: Floats) -> tuple[float, float]:
    half = _Z_975 * standard_error(values)
    return values.mean() - half, values.mean() + half


def _holds(interval: tuple[float, float] | tuple[None, None], truth: float) -> bool:
    low, high = interval
    return low is not None and high is not None and low <= truth <= high


def _rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    for dependence in DEPENDENCES:
        has_documents = dependence.document_spread is not None
        for number in arguments.documents if has_documents else arguments.windows:
            found = measure(dependence, number, arguments.trials)
            shares = [f"{share:.1%}" for share in found]
            row = [dependence.name, f"{number} {'documents' if has_documents else 'windows'}", *shares]
            print(*row, file=sys.stderr, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, nargs="*", default=NUMBERS_OF_WINDOWS)
    parser.add_argument("--documents", type=int, nargs="*", default=NUMBERS_OF_DOCUMENTS)
    parser.add_argument("--trials", type=int, default=1000)
    print(table(("dependence", "units", *INTERVALS, *DOCUMENT_INTERVALS), list(_rows(parser.parse_args()))))


if __name__ == "__main__":
    main()
