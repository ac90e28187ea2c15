"""What a comparison of runs finds, as plain data: tables, plots and the report are made of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scoremode.comparison.run_file import RunFile
from scoremode.wire.protocol import CorpusInfo, Reference

Verdict = Literal["better", "worse", "no difference shown"]

NEGLIGIBLE_KLD = 1e-9
"""Nats, in the mean: below what float32 logits can show, so it is shown as 0."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its two errors."""

    value: float
    stderr: float | None
    """The field's, which takes tokens as independent; None where it is not defined."""
    low: float | None
    """Ends of the 95 % interval that takes neighbours as dependent; None where it cannot be had."""
    high: float | None

    def through(self, function: Callable[[float], float], slope: float | None) -> "Figure":
        """A function of the figure, whose absolute slope there gives the error (delta method); ends go through it."""
        stderr = None if self.stderr is None or slope is None else slope * self.stderr
        if self.low is None or self.high is None:
            return Figure(function(self.value), stderr, None, None)
        return Figure(function(self.value), stderr, *sorted((function(self.low), function(self.high))))


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run's own figures. Those of a comparison with a reference are None for a run that had none."""

    run: RunFile
    nll: Figure
    """Mean NLL, nats per token."""
    perplexity: Figure
    bits_per_byte: Figure | None
    kld: Figure | None
    """Mean KL divergence from the reference, nats."""
    kld_median: float | None
    kld_p95: float | None
    """The 95 % quantile; the next two likewise."""
    kld_p99: float | None
    kld_p999: float | None
    kld_max: float | None
    delta_p_rms: Figure | None
    """Root mean square of the change in the probability of the text's tokens."""
    same_top_p: Figure | None
    """Share of positions with the reference's top token."""
    kld_over_noise_floor: float | None
    """Mean KL divergence over that of the reference's own model compared with itself."""

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
class Comparison:
    """All runs, in the order in which they were given, and every pair of them, the earlier one first."""

    runs: list[RunFigures]
    pairs: list[PairFigures]
    num_resamples: int
    seed: int
    blocks: str
    """How the resamples were drawn, in words, for captions."""

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
        """The reference, where it is the base: the first run is of another model."""
        reference = self.base.reference
        return None if reference is None or reference.fingerprint == self.base.server.fingerprint else reference

    @property
    def corpus(self) -> CorpusInfo | None:
        """Of the first run that names it: all are of one text."""
        return next((figures.run.corpus for figures in self.runs if figures.run.corpus is not None), None)

    @property
    def corpus_names(self) -> list[str]:
        """What the runs call their text, each name once; none where no run names it."""
        return list(dict.fromkeys(figures.run.corpus.name for figures in self.runs if figures.run.corpus is not None))
