"""Runs compared: the figures of each with both of their errors, and a verdict on every pair.

They are plain data, of which tables, plots and the report are made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Generic, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from scoremode.comparison.bootstrap import Resamples, resample
from scoremode.comparison.groups import Group, first_known, groups_of
from scoremode.comparison.run_file import RunFile
from scoremode.errors import RunError
from scoremode.kld import quantile, standard_error
from scoremode.metrics import bits_per_byte, exp
from scoremode.windows import EXHAUSTIVE_METHODS
from scoremode.wire.references import CorpusInfo, Reference

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "no difference shown"]
OPPOSITE: dict[Verdict, Verdict] = {"better": "worse", "worse": "better", "no difference shown": "no difference shown"}

NEGLIGIBLE_KLD = 1e-9
"""Nats, in the mean: below what float32 logits can show, so it is shown as 0."""
LEAST_LN_RATIO = 5e-5
"""Smallest abs(ln(PPL ratio)) that counts: batches of other shapes alone change a model's perplexity by this much."""
DEFAULT_NUM_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its two errors."""

    value: float
    stderr: float | None
    """Treats tokens as independent, as is usual; None where it is not defined."""
    low: float | None
    """Ends of the 95 % interval that treats neighboring tokens as dependent; None where it cannot be computed."""
    high: float | None

    def mapped(self, function: Callable[[float], float], slope: float | None) -> "Figure":
        """Apply a monotonic function to the value and the ends; `slope`, its absolute slope there, scales the error."""
        stderr = None if self.stderr is None or slope is None else slope * self.stderr
        if self.low is None or self.high is None:
            return Figure(function(self.value), stderr, None, None)
        return Figure(function(self.value), stderr, *sorted((function(self.low), function(self.high))))


@dataclass(frozen=True, slots=True)
class EngineLog:
    """A run of another engine. What its log or results do not say is None."""

    engine: str
    path: Path
    label: str
    base_perplexity: float | None
    """Of the base that it was compared with."""
    file_type: str | None
    bits_per_weight: float | None
    gib: float | None = None
    """Of the weights."""
    num_windows: int | None = None
    context_length: int | None = None

    @property
    def weights(self) -> str:
        return ", ".join(filter(None, (self.engine, self.file_type)))


M = TypeVar("M", bound=RunFile | EngineLog, covariant=True, default=RunFile)


@dataclass(frozen=True)
class RunFigures(Generic[M]):
    """One run's own figures. Those of a comparison with a reference are None for a run that had none."""

    run: M
    nll: Figure
    """Mean NLL, nats per token."""
    perplexity: Figure
    bits_per_byte: Figure | None = None
    kld: Figure | None = None
    """Mean KL divergence from the reference, nats."""
    kld_median: float | None = None
    kld_p95: float | None = None
    """The 95 % quantile; the next two likewise."""
    kld_p99: float | None = None
    kld_p999: float | None = None
    kld_max: float | None = None
    delta_p_rms: Figure | None = None
    """Root mean square of the change in the probability of the text's tokens."""
    same_top_p: Figure | None = None
    """Share of positions with the reference's top token."""
    kld_over_noise_floor: float | None = None
    """Mean KL divergence over that of the reference's own model compared with itself."""

    @property
    def known(self) -> dict[str, Figure | float | None]:
        """All figures by name."""
        return {name: getattr(self, name) for name in RunFigures.__annotations__ if name != "run"}

    @property
    def has_no_divergence(self) -> bool:
        """Whether the divergence is too small to be shown, such as that of the reference's own model."""
        return self.kld is not None and self.kld.value < NEGLIGIBLE_KLD


@dataclass(frozen=True, slots=True)
class PairFigures:
    """A run compared with another, position by position: what `second` has more than `first`."""

    first: RunFile
    second: RunFile
    ln_ppl_ratio: Figure
    """Mean NLL of second minus that of first, nats."""
    ppl_ratio: Figure
    ppl_difference: Figure
    kld_difference: Figure | None
    """Mean KL divergence of second minus that of first; None unless both have one from the same reference."""
    verdict: Verdict
    """On second, by its NLL: better where the whole interval of `ln_ppl_ratio` is below 0."""
    kld_verdict: Verdict | None
    """On second, by `kld_difference`; no difference is shown either where both means are below the noise floor."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A run's figures over a group of targets; the last two are None for a run without a reference."""

    run: RunFile
    group: Group
    perplexity: Figure
    ppl_ratio: Figure | None
    """Over that of the base; None for the base itself."""
    kld: Figure | None
    """Mean KL divergence from the reference, nats."""
    same_top_p: Figure | None

    @property
    def known(self) -> dict[str, Figure | float | None]:
        """All figures by name."""
        figures = {name: getattr(self, name) for name in ("perplexity", "ppl_ratio", "kld", "same_top_p")}
        return {"num_scored": self.group.num_scored, **figures}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All runs, in the order in which they were given, and every pair of them, the earlier one first."""

    runs: list[RunFigures]
    pairs: list[PairFigures]
    num_resamples: int
    seed: int
    blocks: str
    """How the resamples were drawn, in words, or why there are none."""
    has_intervals: bool
    groups: Sequence[GroupFigures] = ()
    """Of classes, domains and contexts where the text has several, every run of each."""
    logs: Sequence[RunFigures[EngineLog]] = ()
    """On the same text, without values of single tokens."""

    @property
    def rows(self) -> list[RunFigures[RunFile | EngineLog]]:
        """Runs and logs."""
        return [*self.runs, *self.logs]

    @property
    def base(self) -> RunFile:
        """The first run, which others are compared with."""
        return self.runs[0].run

    @property
    def pairs_with_base(self) -> list[PairFigures]:
        """Every other run, compared with the first."""
        return [pair for pair in self.pairs if pair.first is self.base]

    @property
    def base_reference(self) -> Reference | None:
        """The first run's reference, which is then the base; None if it recorded that run's own model."""
        reference = self.base.reference
        return None if reference is None or reference.is_of(self.base.server) else reference

    def intervals_in_words(self, beginning: str) -> str:
        """After `beginning`, how intervals were computed; or why there are none."""
        if not self.has_intervals:
            return f"{self.blocks.capitalize()}."
        return f"{beginning}: {self.blocks}, {self.num_resamples:,} resamples."

    @property
    def corpus(self) -> CorpusInfo | None:
        """Of the first run that names it: all are of one text."""
        return next((figures.run.corpus for figures in self.runs if figures.run.corpus is not None), None)

    @property
    def corpus_names(self) -> list[str]:
        """What the runs call their text, each name once; none where no run names it."""
        return list(dict.fromkeys(figures.run.corpus.name for figures in self.runs if figures.run.corpus is not None))


def compare(runs: Sequence[RunFile], *, num_resamples: int = DEFAULT_NUM_RESAMPLES, seed: int = 0) -> RunComparison:
    """Compare runs on the same tokens, each with each.

    Args:
        runs: At least one, of one text, tokenizer, method and windows, each with a label of its own.
        num_resamples: Of the text, for the intervals.
        seed: Of the resamples; the same seed gives the same intervals.

    Raises:
        RunError: the runs cannot be compared.
    """
    check_comparable(runs)
    groups = groups_of(runs)
    values = {(run.label, name): series for run in runs for name, series in _series(run).items()}
    noise_floors = _noise_floors(runs)
    klds = [run.kld for run in runs if run.kld is not None]
    # Infinities are expected, and what cannot be computed with them is None or NaN in the end.
    with np.errstate(invalid="ignore", over="ignore"):
        of_text, *of_groups = resample(
            np.column_stack(list(values.values())),
            # These set the block length: the first run's NLLs, the others' differences from them, and the divergences.
            np.column_stack([runs[0].nlls, *(run.nlls - runs[0].nlls for run in runs[1:]), *klds]),
            runs[0].window_sizes,
            first_known(runs, "window_documents"),
            [group.members for group in groups],
            num_resamples=num_resamples,
            seed=seed,
        )
        sample = _Sample(values, of_text)
        figures = [sample.run_figures(run, noise_floors.get((run.reference_identity, run.lane))) for run in runs]
        group_figures: list[GroupFigures] = []
        for group, resamples in zip(groups, of_groups, strict=True):
            part = _Sample({name: series[group.members] for name, series in values.items()}, resamples)
            group_figures += [part.group_figures(run, runs[0], group) for run in runs]
        return RunComparison(
            runs=figures,
            pairs=[sample.pair_figures(first, second) for first, second in combinations(figures, 2)],
            num_resamples=num_resamples,
            seed=seed,
            blocks=of_text.blocks,
            has_intervals=math.isfinite(of_text.factor),
            groups=group_figures,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Values of all runs over the targets of a text or of a group, and their means over the resamples."""

    values: Mapping[tuple[str, str], Floats]
    """By the run's label and the name of the series."""
    resamples: Resamples

    def _resampled(self, run: RunFile, name: str) -> Floats:
        return self.resamples.means[:, list(self.values).index((run.label, name))]

    def run_figures(self, run: RunFile, noise_floor: float | None) -> RunFigures:
        nll, kld = self._mean(run, "nll"), self._clipped_mean(run, "kld")
        square = self._clipped_mean(run, "delta_p_square")
        names = {"kld_median": 0.5, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1}
        ordered = None if run.kld is None else np.sort(run.kld)
        return RunFigures(
            run=run,
            nll=nll,
            perplexity=_exponential(nll),
            bits_per_byte=_bits_per_byte(run, nll),
            kld=kld,
            **{name: None if ordered is None else quantile(ordered, at) for name, at in names.items()},
            same_top_p=self._clipped_mean(run, "same_top", 1),
            delta_p_rms=square and square.mapped(math.sqrt, 0.5 / math.sqrt(square.value) if square.value else None),
            kld_over_noise_floor=kld.value / noise_floor if kld is not None and noise_floor else None,
        )

    def group_figures(self, run: RunFile, base: RunFile, group: Group) -> GroupFigures:
        return GroupFigures(
            run=run,
            group=group,
            perplexity=_exponential(self._mean(run, "nll")),
            ppl_ratio=None if run is base else _exponential(self._difference(base, run, "nll")),
            kld=self._clipped_mean(run, "kld"),
            same_top_p=self._clipped_mean(run, "same_top", 1),
        )

    def pair_figures(self, of_first: RunFigures, of_second: RunFigures) -> PairFigures:
        first, second = of_first.run, of_second.run
        ln_ratio = self._difference(first, second, "nll")
        ppl_first, ppl_second = of_first.perplexity.value, of_second.perplexity.value
        resampled = np.exp(self._resampled(second, "nll")) - np.exp(self._resampled(first, "nll"))
        stderr = standard_error(ppl_second * second.nlls - ppl_first * first.nlls)
        kld_difference, kld_verdict = None, None
        if first.kld is not None and second.kld is not None and first.reference_identity == second.reference_identity:
            kld_difference = self._difference(first, second, "kld")
            kld_verdict = _verdict(kld_difference)
            multiples = (of_first.kld_over_noise_floor, of_second.kld_over_noise_floor)
            if all(multiple is not None and multiple <= 1 for multiple in multiples):
                kld_verdict = "no difference shown"
        return PairFigures(
            first=first,
            second=second,
            ln_ppl_ratio=ln_ratio,
            ppl_ratio=_exponential(ln_ratio),
            ppl_difference=self._figure(ppl_second - ppl_first, stderr, resampled),
            kld_difference=kld_difference,
            verdict=_verdict(ln_ratio, LEAST_LN_RATIO),
            kld_verdict=kld_verdict,
        )

    def _difference(self, first: RunFile, second: RunFile, name: str) -> Figure:
        values = self.values[second.label, name] - self.values[first.label, name]
        resampled = self._resampled(second, name) - self._resampled(first, name)
        return self._figure(float(values.mean()), standard_error(values), resampled)

    def _mean(self, run: RunFile, name: str) -> Figure:
        values = self.values[run.label, name]
        return self._figure(float(values.mean()), standard_error(values), self._resampled(run, name))

    def _clipped_mean(self, run: RunFile, name: str, most: float = math.inf) -> Figure | None:
        """The mean, with its interval clipped to [0, `most`]; None for a run without these values."""
        if (run.label, name) not in self.values:
            return None
        mean = self._mean(run, name)
        ends = (None if end is None else min(max(end, 0.0), most) for end in (mean.low, mean.high))
        return Figure(mean.value, mean.stderr, *ends)

    def _figure(self, value: float, stderr: float, resampled: Floats) -> Figure:
        finite = stderr if math.isfinite(stderr) else None
        return Figure(value, finite, *self.resamples.interval(value, resampled))


def ppl_change(comparison: RunComparison, run: RunFile) -> Figure | None:
    """Of the perplexity, as a share of the base's; None for the base itself."""
    base_nlls = comparison.base.nlls if comparison.base_reference is None else comparison.base.reference_nlls
    if base_nlls is None or base_nlls is run.nlls:
        return None
    with np.errstate(invalid="ignore"):
        difference = run.nlls - base_nlls
        ratio = exp(float(difference.mean()))
        return Figure(ratio - 1, ratio * standard_error(difference), None, None)


def _series(run: RunFile) -> dict[str, Floats]:
    """Values of all targets, by the names that `_Sample` has for them, as far as the run has them."""
    square = None if run.delta_p is None else run.delta_p**2
    series = {"nll": run.nlls, "kld": run.kld, "same_top": run.same_top, "delta_p_square": square}
    return {name: np.asarray(values, np.float64) for name, values in series.items() if values is not None}


def _noise_floors(runs: Sequence[RunFile]) -> dict[object, float]:
    """By reference and lane, the largest that any run has: runs from before it was measured have none."""
    known = sorted((run.noise_floor, run.reference_identity, run.lane) for run in runs if run.noise_floor is not None)
    return {(identity, lane): floor for floor, identity, lane in known}


def _exponential(of: Figure) -> Figure:
    return of.mapped(exp, exp(of.value))


def _bits_per_byte(run: RunFile, nll: Figure) -> Figure | None:
    if not run.num_bytes:
        return None
    num_tokens = run.num_scored if run.method in EXHAUSTIVE_METHODS else run.num_tokens
    factor = bits_per_byte(num_tokens, run.num_bytes)
    return nll.mapped(lambda value: factor * value, factor)


def _verdict(difference: Figure, least: float = 0.0) -> Verdict:
    """No difference is shown if the interval contains 0, or if both of its ends are closer to 0 than `least`."""
    low, high = difference.low, difference.high
    if low is None or high is None or low <= 0 <= high or max(-low, high) < least:
        return "no difference shown"
    return "better" if high < 0 else "worse"


def check_labels(labels: Sequence[str]) -> None:
    """Raise RunError for labels that occur twice."""
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise RunError(f"{labels.count(repeated[0])} runs are called {repeated[0]!r}: give them labels of their own")


def check_comparable(runs: Sequence[RunFile]) -> None:
    """Raise RunError if there are no runs, two have one label, or one differs from the first in text, tokens or
    windows."""
    if not runs:
        raise RunError("give at least one run to compare")
    check_labels([run.label for run in runs])
    for run in runs[1:]:
        if difference := _run_difference(runs[0], run):
            raise RunError(f"{runs[0].path} and {run.path} cannot be compared: {difference}")


def _run_difference(first: RunFile, second: RunFile) -> str | None:
    """The first thing that differs, in words."""
    settings = {
        # Runs of kinds `kld` and `perplexity` identify their text by different hashes, which cannot be compared.
        **({"text_identity": "text (its fingerprint)"} if first.kind == second.kind else {}),
        **{"method": "method", "context_length": "context length", "stride": "stride"},
        **{"num_windows": "number of windows", "num_scored": "number of scored tokens"},
    }
    for name, words in settings.items():
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return f"the {words} is {one} in the first and {other} in the second"
    if not np.array_equal(first.window_sizes, second.window_sizes):
        return "their windows have different numbers of tokens"
    return _token_difference(first, second)


def _token_difference(first: RunFile, second: RunFile) -> str | None:
    differing = np.flatnonzero(first.token_ids != second.token_ids)
    if not len(differing):
        return None
    at = int(differing[0])
    window = int(np.searchsorted(np.cumsum(first.window_sizes), at, side="right"))
    return (
        f"{len(differing):,} of {first.num_scored:,} token ids differ, the first in window {window}: "
        f"{first.token_ids[at]} and {second.token_ids[at]}; the runs used different texts or tokenizers"
    )
