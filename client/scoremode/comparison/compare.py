"""From runs to figures with both of their errors, and to a verdict on every pair of runs."""

import math
from collections.abc import Callable, Sequence
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
        series = {(run.label, name): values for run in runs for name, values in _series(run).items()}
        self._column = {key: number for number, key in enumerate(series)}
        self._noise_floors = _noise_floors(runs)
        self.resamples: Resamples = resample(
            np.column_stack(list(series.values())),
            np.column_stack(_watched(runs)),
            runs[0].window_sizes,
            num_resamples=num_resamples,
            seed=seed,
        )

    def run_figures(self, run: RunFile) -> RunFigures:
        nll = self._mean(run.nlls, self._means(run, "nll"))
        kld, same_top = run.kld, run.same_top
        names = {"kld_median": 0.5, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1}
        ordered = None if kld is None else np.sort(kld)
        quantiles = {name: None if ordered is None else quantile(ordered, at) for name, at in names.items()}
        kld_mean = None if kld is None else _within(self._mean(kld, self._means(run, "kld")), 0, math.inf)
        return RunFigures(
            run=run,
            nll=nll,
            perplexity=_exponential(nll),
            bits_per_byte=_bits_per_byte(run, nll),
            kld=kld_mean,
            **quantiles,
            same_top_p=None
            if same_top is None
            else _within(self._mean(same_top.astype(np.float64), self._means(run, "same_top")), 0, 1),
            delta_p_rms=self._delta_p_rms(run),
            kld_over_noise_floor=self._over_noise_floor(run),
        )

    def pair_figures(self, first: RunFile, second: RunFile) -> PairFigures:
        of_first, of_second = self._means(first, "nll"), self._means(second, "nll")
        ln_ratio = self._mean(second.nlls - first.nlls, of_second - of_first)
        kld_difference = None
        if first.kld is not None and second.kld is not None and first.reference_identity == second.reference_identity:
            resampled = self._means(second, "kld") - self._means(first, "kld")
            kld_difference = self._mean(second.kld - first.kld, resampled)
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
        value = ppl_second - ppl_first
        resampled = np.exp(self._means(second, "nll")) - np.exp(self._means(first, "nll"))
        stderr = standard_error(ppl_second * second.nlls - ppl_first * first.nlls)
        return Figure(value, _finite(stderr), *self.resamples.interval(value, resampled))

    def _delta_p_rms(self, run: RunFile) -> Figure | None:
        """The delta method for the standard error, as `kld.statistics` has it; ends of the interval are roots."""
        if run.delta_p is None:
            return None
        square = _within(self._mean(run.delta_p**2, self._means(run, "delta_p_square")), 0, math.inf)
        rms = math.sqrt(square.value)
        stderr = 0.5 / rms * square.stderr if rms and square.stderr is not None else None
        return Figure(rms, stderr, *_both(math.sqrt, square))

    def _over_noise_floor(self, run: RunFile) -> float | None:
        floor = self._noise_floors.get(run.reference_identity)
        return float(run.kld.mean()) / floor if run.kld is not None and floor else None

    def _kld_verdict(self, difference: Figure, first: RunFile, second: RunFile) -> Verdict:
        multiples = [self._over_noise_floor(run) for run in (first, second)]
        if all(multiple is not None and multiple <= 1 for multiple in multiples):
            return "no difference shown"
        return _verdict(difference)

    def _means(self, run: RunFile, name: str) -> Floats:
        """[resamples]"""
        return self.resamples.means[:, self._column[run.label, name]]

    def _mean(self, values: Floats, resampled: Floats) -> Figure:
        value = float(values.mean())
        return Figure(value, _finite(standard_error(values)), *self.resamples.interval(value, resampled))


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
    """What means are taken of."""
    series = {"nll": run.nlls}
    if run.kld is not None:
        series["kld"] = run.kld
    if run.same_top is not None:
        series["same_top"] = run.same_top.astype(np.float64)
    if run.delta_p is not None:
        series["delta_p_square"] = run.delta_p**2
    return series


def _noise_floors(runs: Sequence[RunFile]) -> dict[tuple[str, str] | None, float]:
    """Of each reference, the largest that a run knows: it may have been measured after some of them."""
    floors: dict[tuple[str, str] | None, float] = {}
    for run in runs:
        if run.noise_floor is not None:
            floors[run.reference_identity] = max(run.noise_floor, floors.get(run.reference_identity, 0))
    return floors


def _watched(runs: Sequence[RunFile]) -> list[Floats]:
    """What decides the length of blocks: the NLLs of the first run, what others differ by, and the divergences."""
    base, *others = runs
    return [
        base.nlls,
        *(run.nlls - base.nlls for run in others),
        *(run.kld for run in runs if run.kld is not None),
    ]


def _exponential(of: Figure) -> Figure:
    """The delta method for the standard error; ends of an interval go as they are."""
    value = exp(of.value)
    return Figure(value, None if of.stderr is None else value * of.stderr, *_both(exp, of))


def _within(of: Figure, least: float, most: float) -> Figure:
    """An interval without what the figure cannot be."""
    return Figure(of.value, of.stderr, *_both(lambda end: min(max(end, least), most), of))


def _both(change: Callable[[float], float], of: Figure) -> tuple[float, float] | tuple[None, None]:
    return (None, None) if of.low is None or of.high is None else (change(of.low), change(of.high))


def _bits_per_byte(run: RunFile, nll: Figure) -> Figure | None:
    if not run.num_bytes:
        return None
    num_tokens = run.num_scored if run.method in EXHAUSTIVE_METHODS else run.num_tokens
    factor = bits_per_byte(num_tokens, run.num_bytes)
    stderr = None if nll.stderr is None else factor * nll.stderr
    return Figure(factor * nll.value, stderr, *_both(lambda end: factor * end, nll))


def _verdict(difference: Figure, least: float = 0.0) -> Verdict:
    """None where neither end of the interval is as far from 0 as a difference that could matter."""
    if difference.low is None or difference.high is None or max(-difference.low, difference.high) < least:
        return "no difference shown"
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "no difference shown"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
