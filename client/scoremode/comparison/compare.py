"""From runs to figures with both of their errors, and to a verdict on every pair of runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.bootstrap import Resamples, resample
from scoremode.comparison.figures import Comparison, Figure, PairFigures, RunFigures, Verdict
from scoremode.comparison.pairing import check_comparable
from scoremode.comparison.run_file import RunFile
from scoremode.kld import quantile, standard_error
from scoremode.metrics import bits_per_byte, exp
from scoremode.windows import EXHAUSTIVE_METHODS

Floats = NDArray[np.float64]

DEFAULT_NUM_RESAMPLES = 4000
LEAST_LN_RATIO = 5e-5
"""Of two perplexities: what batches of other shapes move the same model's by, and far below what any use could show."""


def compare(runs: Sequence[RunFile], *, num_resamples: int = DEFAULT_NUM_RESAMPLES, seed: int = 0) -> Comparison:
    """Compare runs on the same tokens, each with each.

    Args:
        runs: At least one, of one text, tokenizer, method and windows, each with a label of its own.
        num_resamples: Of the text, for the intervals.
        seed: Of the resamples; the same seed gives the same intervals.

    Raises:
        RunError: the runs cannot be compared.
    """
    check_comparable(runs)
    # Infinities are expected, and what cannot be computed with them is None or NaN in the end.
    with np.errstate(invalid="ignore", over="ignore"):
        sample = _Sample(runs, num_resamples, seed)
        return Comparison(
            runs=[sample.run_figures(run) for run in runs],
            pairs=[sample.pair_figures(first, second) for first, second in combinations(runs, 2)],
            num_resamples=num_resamples,
            seed=seed,
            blocks=sample.resamples.blocks,
        )


class _Sample:
    """All values of all runs over the targets of one text, and their means over its resamples."""

    def __init__(self, runs: Sequence[RunFile], num_resamples: int, seed: int) -> None:
        self._values = {(run.label, name): values for run in runs for name, values in _series(run).items()}
        self._noise_floors = _noise_floors(runs)
        self.resamples: Resamples = resample(
            np.column_stack(list(self._values.values())),
            np.column_stack(_watched(runs)),
            runs[0].window_sizes,
            num_resamples=num_resamples,
            seed=seed,
        )
        self._means = dict(zip(self._values, self.resamples.means.T, strict=True))

    def run_figures(self, run: RunFile) -> RunFigures:
        nll = self._mean(run, "nll")
        square = self._mean_within(run, "delta_p_square", math.inf)
        names = {"kld_median": 0.5, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1}
        ordered = None if run.kld is None else np.sort(run.kld)
        return RunFigures(
            run=run,
            nll=nll,
            perplexity=_exponential(nll),
            bits_per_byte=_bits_per_byte(run, nll),
            kld=self._mean_within(run, "kld", math.inf),
            **{name: None if ordered is None else quantile(ordered, at) for name, at in names.items()},
            same_top_p=self._mean_within(run, "same_top", 1),
            delta_p_rms=square and square.through(math.sqrt, 0.5 / math.sqrt(square.value) if square.value else None),
            kld_over_noise_floor=self._over_noise_floor(run),
        )

    def pair_figures(self, first: RunFile, second: RunFile) -> PairFigures:
        ln_ratio, kld_difference = self._difference(first, second, "nll"), None
        if first.kld is not None and second.kld is not None and first.reference_identity == second.reference_identity:
            kld_difference = self._difference(first, second, "kld")
        return PairFigures(
            first=first,
            second=second,
            ln_ppl_ratio=ln_ratio,
            ppl_ratio=_exponential(ln_ratio),
            ppl_difference=self._ppl_difference(first, second),
            kld_difference=kld_difference,
            verdict=_verdict(ln_ratio, LEAST_LN_RATIO),
            kld_verdict=None if kld_difference is None else self._kld_verdict(kld_difference, first, second),
        )

    def _ppl_difference(self, first: RunFile, second: RunFile) -> Figure:
        ppl_first, ppl_second = exp(float(first.nlls.mean())), exp(float(second.nlls.mean()))
        resampled = np.exp(self._means[second.label, "nll"]) - np.exp(self._means[first.label, "nll"])
        stderr = standard_error(ppl_second * second.nlls - ppl_first * first.nlls)
        return self._figure(ppl_second - ppl_first, stderr, resampled)

    def _over_noise_floor(self, run: RunFile) -> float | None:
        floor = self._noise_floors.get(run.reference_identity)
        return float(run.kld.mean()) / floor if run.kld is not None and floor else None

    def _kld_verdict(self, difference: Figure, first: RunFile, second: RunFile) -> Verdict:
        multiples = [self._over_noise_floor(run) for run in (first, second)]
        if all(multiple is not None and multiple <= 1 for multiple in multiples):
            return "no difference shown"
        return _verdict(difference)

    def _difference(self, first: RunFile, second: RunFile, name: str) -> Figure:
        values = self._values[second.label, name] - self._values[first.label, name]
        resampled = self._means[second.label, name] - self._means[first.label, name]
        return self._figure(float(values.mean()), standard_error(values), resampled)

    def _mean(self, run: RunFile, name: str) -> Figure:
        values = self._values[run.label, name]
        return self._figure(float(values.mean()), standard_error(values), self._means[run.label, name])

    def _mean_within(self, run: RunFile, name: str, most: float) -> Figure | None:
        """An interval without what the figure cannot be; None for a run without these values."""
        if (run.label, name) not in self._values:
            return None
        mean = self._mean(run, name)
        low, high = (None if end is None else min(max(end, 0.0), most) for end in (mean.low, mean.high))
        return replace(mean, low=low, high=high)

    def _figure(self, value: float, stderr: float, resampled: Floats) -> Figure:
        finite = stderr if math.isfinite(stderr) else None
        return Figure(value, finite, *self.resamples.interval(value, resampled))


def ppl_change(comparison: Comparison, run: RunFile) -> Figure | None:
    """Of the perplexity, as a share of the base's; None for the base itself."""
    base_nlls = comparison.base.nlls if comparison.base_reference is None else comparison.base.reference_nlls
    if base_nlls is None or base_nlls is run.nlls:
        return None
    with np.errstate(invalid="ignore"):
        difference = run.nlls - base_nlls
        ratio = exp(float(difference.mean()))
        return Figure(ratio - 1, ratio * standard_error(difference), None, None)


def _series(run: RunFile) -> dict[str, Floats]:
    same_top, delta_p = run.same_top, run.delta_p
    series = {
        "nll": run.nlls,
        "kld": run.kld,
        "same_top": None if same_top is None else same_top.astype(np.float64),
        "delta_p_square": None if delta_p is None else delta_p**2,
    }
    return {name: values for name, values in series.items() if values is not None}


def _noise_floors(runs: Sequence[RunFile]) -> dict[tuple[str, str] | None, float]:
    """Of each reference, the largest that a run knows: it may have been measured after some of them."""
    known = sorted((run.noise_floor, run.reference_identity) for run in runs if run.noise_floor is not None)
    return {identity: floor for floor, identity in known}


def _watched(runs: Sequence[RunFile]) -> list[Floats]:
    """What decides the length of blocks: the NLLs of the first run, what others differ by, and the divergences."""
    base, *others = runs
    klds = [run.kld for run in runs if run.kld is not None]
    return [base.nlls, *(run.nlls - base.nlls for run in others), *klds]


def _exponential(of: Figure) -> Figure:
    return of.through(exp, exp(of.value))


def _bits_per_byte(run: RunFile, nll: Figure) -> Figure | None:
    if not run.num_bytes:
        return None
    num_tokens = run.num_scored if run.method in EXHAUSTIVE_METHODS else run.num_tokens
    factor = bits_per_byte(num_tokens, run.num_bytes)
    return nll.through(lambda value: factor * value, factor)


def _verdict(difference: Figure, least: float = 0.0) -> Verdict:
    """None where neither end of the interval is as far from 0 as a difference that could matter."""
    if difference.low is None or difference.high is None or max(-difference.low, difference.high) < least:
        return "no difference shown"
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "no difference shown"
