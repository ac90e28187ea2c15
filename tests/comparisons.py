"""Comparisons for tests of plots and reports: figures from the arrays by plain formulas, without a bootstrap."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from scoremode.comparison.figures import Comparison, Figure, PairFigures, RunFigures
from scoremode.comparison.run_file import RunFile


def comparison_of(runs: Sequence[RunFile]) -> Comparison:
    """All runs and pairs; intervals are those of independent tokens."""
    return Comparison(
        runs=[run_figures(run) for run in runs],
        pairs=[pair_figures(first, second) for first, second in combinations(runs, 2)],
        num_resamples=1000,
        seed=7,
        blocks="whole windows, drawn with replacement",
    )


def figure_of(values, transform=float) -> Figure:
    """The transformed mean of values, with the ends of its interval."""
    mean, stderr = values.mean(), values.std() / math.sqrt(len(values))
    return Figure(transform(mean), stderr, transform(mean - 1.96 * stderr), transform(mean + 1.96 * stderr))


def run_figures(run: RunFile) -> RunFigures:
    """Of one run."""
    kld = run.kld
    return RunFigures(
        run=run,
        nll=figure_of(run.nlls),
        perplexity=figure_of(run.nlls, math.exp),
        bits_per_byte=None,
        kld=None if kld is None else figure_of(kld),
        kld_median=None if kld is None else float(np.median(kld)),
        kld_p99=None if kld is None else float(np.quantile(kld, 0.99)),
        kld_max=None if kld is None else float(kld.max()),
        same_top_p=None if run.same_top is None else figure_of(run.same_top.astype(float)),
        kld_over_noise_floor=None if kld is None or not run.noise_floor else float(kld.mean() / run.noise_floor),
    )


def pair_figures(first: RunFile, second: RunFile) -> PairFigures:
    """Of two runs, with verdicts by the intervals."""
    difference = figure_of(second.nlls - first.nlls)
    kld = None if first.kld is None or second.kld is None else figure_of(second.kld - first.kld)
    return PairFigures(
        first=first,
        second=second,
        ln_ppl_ratio=difference,
        ppl_ratio=figure_of(second.nlls - first.nlls, math.exp),
        ppl_difference=Figure(math.exp(second.nlls.mean()) - math.exp(first.nlls.mean()), None, None, None),
        kld_difference=kld,
        verdict=_verdict(difference),
        kld_verdict=None if kld is None else _verdict(kld),
    )


def _verdict(figure: Figure):
    if figure.high < 0:
        return "better"
    return "worse" if figure.low > 0 else "no difference shown"
