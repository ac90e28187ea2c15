"""The figures of compared runs, and how every form of a comparison shows them: headings, digits, units and cells."""

import math
import os.path
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal

from typing_extensions import TypeVar

from scoremode._texts import printable
from scoremode.comparison.groups import TokenGroup
from scoremode.comparison.run_file import RunFile
from scoremode.kld import NEGLIGIBLE_KLD
from scoremode.wire import CorpusInfo

if TYPE_CHECKING:
    from scoremode.accuracy.compare_tasks import TaskComparison

Verdict = Literal["better", "worse", "no difference shown", "no interval"]
OPPOSITE: dict[Verdict, Verdict] = {
    "better": "worse",
    "worse": "better",
    "no difference shown": "no difference shown",
    "no interval": "no interval",
}
Size = Literal["gib", "bits_per_weight"]
NOT_KNOWN = "-"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its two errors."""

    value: float
    stderr: float | None
    """Treats tokens as independent, as is usual; None where it is not defined."""
    low: float | None
    """Ends of the 95 % interval that treats neighboring tokens as dependent; None where it cannot be computed, or all
    resamples are equal."""
    high: float | None

    def mapped(self, function: Callable[[float], float], slope: float | None) -> "Figure":
        """Apply a monotonic function to the value and the ends; `slope`, its absolute slope there, scales the error."""
        stderr = None if self.stderr is None or slope is None else slope * self.stderr
        if self.low is None or self.high is None:
            return Figure(function(self.value), stderr, None, None)
        return Figure(function(self.value), stderr, *sorted((function(self.low), function(self.high))))


@dataclass(frozen=True, slots=True)
class Metric:
    """How all forms of a comparison show one figure of its runs."""

    name: str
    """In CSV files, and the attribute that has the value."""
    heading: str
    """In text."""
    report_heading: str
    """Empty for a figure that the report leaves out."""
    digits: int
    """Decimals in text; the report has as many as an error leaves."""
    unit: str = ""
    """After values in the report; `%` where the value is a share."""
    of_run: bool = False
    """Whether it is an attribute of the run, such as the size of its weights, which has no error."""
    has_fixed_digits: bool = False
    """Whether the report has `digits` too."""

    @property
    def scale(self) -> int:
        """From the value to the number that is shown."""
        return 100 if self.unit == "%" else 1


METRICS = {
    metric.name: metric
    for metric in (
        Metric("kld", "mean KLD, nats", "mean KL", 6),
        Metric("ppl_ratio", "over that of {base}", "PPL ratio", 4),
        Metric("perplexity", "perplexity", "perplexity", 4),
        Metric("gib", "GiB", "GiB", 3, of_run=True, has_fixed_digits=True),
        Metric("bits_per_weight", "bits per weight", "bits per weight", 2, of_run=True, has_fixed_digits=True),
        Metric("bits_per_byte", "bits per byte", "bits per byte", 4),
        Metric("kld_median", "median KLD", "median KL", 6),
        Metric("kld_p95", "95 %", "", 4),
        Metric("kld_p99", "99 %", "99% KL", 4),
        Metric("kld_p999", "99.9 %", "99.9% KL", 4),
        Metric("kld_max", "max KLD", "max KL", 4),
        Metric("delta_p_rms", "RMS Δp, %", "RMS Δp", 3, "%"),
        Metric("same_top_p", "same top p, %", "same top p", 3, "%"),
        Metric("kld_over_noise_floor", "times the floor", "times the floor", 1, has_fixed_digits=True),
        Metric("agreement_median", "same for, median tokens", "same for, median", 0, has_fixed_digits=True),
        Metric("agreement_p25", "same for, 25 %", "same for, 25%", 0, has_fixed_digits=True),
        Metric("agreement_p75", "same for, 75 %", "same for, 75%", 0, has_fixed_digits=True),
        Metric("agreement_p10", "same for, 10 %", "same for, 10%", 0, has_fixed_digits=True),
        Metric("agreement_share", "same to the end, %", "same to the end", 1, "%", has_fixed_digits=True),
        Metric("agreement_ties", "ties", "ties", 0, has_fixed_digits=True),
        Metric("agreement_floor", "floor, median tokens", "floor, median", 0, has_fixed_digits=True),
        Metric("agreement_floor_share", "floor, to the end, %", "floor, to the end", 1, "%", has_fixed_digits=True),
        Metric("expected_agreement", "sampled: same for, mean tokens", "sampled: same for", 1, has_fixed_digits=True),
        Metric("ppl_change", "change of perplexity, %", "", 2, "%"),
    )
}
"""In the order of the report's columns: those first that a phone shows. docs/compare.md describes them."""


_FROM_THE_REFERENCE = {name for name in METRICS if name.startswith(("kld", "delta_p", "same_top"))}


@dataclass(frozen=True, slots=True)
class EngineLog:
    """A run of llama.cpp. Figures that its log does not have are None."""

    path: Path
    label: str
    base_perplexity: float | None
    """Of the base that it was compared with."""
    file_type: str | None
    bits_per_weight: float | None
    gib: float | None
    """Size of the weights."""
    num_windows: int
    context_length: int

    @property
    def weights(self) -> str:
        return ", ".join(filter(None, ("llama.cpp", self.file_type)))


M = TypeVar("M", bound=RunFile | EngineLog, covariant=True, default=RunFile)


@dataclass(frozen=True)
class RunFigures(Generic[M]):
    """One run's figures, over the text or a group of its targets. Those of a comparison with a reference are None for a
    run that had none."""

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
    agreement_median: Figure | None = None
    """For a reference of greedy answers, the median of the tokens that are the same; infinite if half of the answers
    are the same to the end. The next three are other quantiles."""
    agreement_p25: Figure | None = None
    agreement_p75: Figure | None = None
    agreement_p10: Figure | None = None
    agreement_share: Figure | None = None
    """Share of the answers that are the same to their end."""
    agreement_ties: float | None = None
    """Tokens up to the first difference whose logit is the highest, and another's too."""
    agreement_floor: Figure | None = None
    """The median of the reference's own model in this lane; next its share."""
    agreement_floor_share: Figure | None = None
    expected_agreement: Figure | None = None
    """For a reference of sampled answers, the mean number of tokens that two coupled samplers have in common."""
    ppl_ratio: Figure | None = None
    """Perplexity over that of the base, paired by token; None for the base itself."""

    @property
    def ppl_change(self) -> Figure | None:
        """The change of the perplexity as a share of the base's; None for the base itself."""
        return None if self.ppl_ratio is None else self.ppl_ratio.mapped(lambda ratio: ratio - 1, 1)

    def value(self, name: str) -> Any:
        """The `Figure` or the number of a metric; None where it is not known, and where it only says that the base
        does not differ from itself."""
        if self.has_no_divergence and self.ppl_ratio is None and name in _FROM_THE_REFERENCE:
            return None
        return getattr(self.run if METRICS[name].of_run else self, name)

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
    """On second, by its NLL: no difference where the interval contains 0 or stays within `LEAST_LN_RATIO` of it. There
    is no interval for a text that is too short, or with an infinite NLL. If all resamples are equal, they decide."""
    kld_verdict: Verdict | None
    """On second, by `kld_difference`; no difference is shown either where both means are below the noise floor."""

    @property
    def has_original(self) -> bool:
        """Whether one of them is the original, from which every copy differs on enough text: how much is the question,
        and a verdict has no answer. Without a reference, a model that is not quantized is the original of one that
        is."""
        runs = (self.first, self.second)
        references = [run.reference for run in runs if run.reference is not None]
        if references:
            return any(reference.is_of(run.server) for reference in references for run in runs)
        return (self.first.server.quantization is None) != (self.second.server.quantization is None)

    def in_words(self, verdict: Verdict | None) -> str:
        """One of its verdicts as tables show it: against the original there is none."""
        return NOT_KNOWN if verdict is None or (self.has_original and verdict != "no interval") else verdict


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All runs, the base first and then in the order in which they were given, and every pair, earlier first."""

    runs: list[RunFigures]
    pairs: list[PairFigures]
    num_resamples: int
    seed: int
    blocks: str
    """How the resamples were drawn, in words, or why there are none."""
    has_intervals: bool
    groups: Sequence[tuple[TokenGroup, RunFigures]] = ()
    """Of classes, domains and contexts where the text has several, every run of each."""
    logs: Sequence[RunFigures[EngineLog]] = ()
    """On the same text, without values of single tokens."""
    warnings: Sequence[str] = ()
    """On the choice of the base."""
    size: Size = "gib"
    """What plots and the table of the best at each size are drawn against, where it is known."""
    chosen_base: str | None = None
    """Label of the base, if it was chosen by name."""
    max_kld: float | None = None
    """The tolerance that was named for the mean KL divergence, nats."""
    max_ppl_increase: float | None = None
    """The tolerance for the increase of perplexity over the base's, percent."""
    tasks: "TaskComparison | None" = None
    """Accuracies on tasks, to be shown as well."""

    @property
    def rows(self) -> list[RunFigures[RunFile | EngineLog]]:
        """Runs and logs."""
        return [*self.runs, *self.logs]

    @property
    def files(self) -> list[RunFile]:
        """The runs as their files have them."""
        return [figures.run for figures in self.runs]

    @property
    def base(self) -> RunFile:
        """The first run, which others are compared with."""
        return self.runs[0].run

    @property
    def base_pairs(self) -> dict[str, PairFigures]:
        """The pairs with the base, by the label of the other run."""
        # They come first.
        return {pair.second.label: pair for pair in self.pairs[: len(self.runs) - 1]}

    def intervals_in_words(self, beginning: str) -> str:
        """After `beginning`, how intervals were computed; or why there are none."""
        if not self.has_intervals:
            return f"{self.blocks.capitalize()}."
        return f"{beginning}: {self.blocks}, {self.num_resamples:,} resamples."

    def command(self, *options: str) -> str:
        """The command that compares these runs again, in the folder of their files. Labels with a comma are left to be
        chosen."""
        runs = [run for run in self.files if not run.is_reference]
        runs += [replace(run.answers, label=f"{run.label} (answers)") for run in runs if run.answers is not None]
        paths = [run.path.absolute() for run in runs]
        folder = os.path.commonpath([path.parent for path in paths])
        files = [os.path.relpath(path, folder) for path in paths]
        words = ["ppl-client", "compare", *files]
        if not any("," in run.label for run in runs):
            words += ["--labels", ",".join(run.label for run in runs)]
        if self.chosen_base is not None:
            words += ["--base", self.chosen_base]
        return printable(shlex.join([*words, *options]))

    @property
    def corpus(self) -> CorpusInfo | None:
        """The text as the first run that knows it describes it: all runs are of one text."""
        return next((run.corpus for run in self.files if run.corpus is not None), None)

    @property
    def answers_in_words(self) -> str:
        """The answers that were compared in addition to the text; empty without any."""
        parts = [
            f"{run.answers.reference.answers.in_words}; the prompts are {run.answers.text_in_words}"
            for run in self.files
            if run.answers and run.answers.reference and run.answers.reference.answers
        ]
        return "; ".join(dict.fromkeys(parts))


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: float | None = None
    errors: tuple[str, ...] = ()
    mark: str = ""
    """A class of the style sheet."""
    tip: str = ""
    """What is shown of it on demand."""

    @property
    def in_text(self) -> str:
        """The value and its errors, for a terminal."""
        return " ".join((self.text, *self.errors)).replace("∞", "inf")

    @property
    def sort_value(self) -> str:
        """The value as JavaScript reads a number; empty where there is none."""
        return "" if self.value is None else str(self.value).replace("inf", "Infinity")


def cell_of(metric: Metric, value: Figure | float | None, digits: int | None, unit: str = "") -> Cell:
    """A value with its errors, to so many digits after the point, or to those that its error leaves."""
    if isinstance(value, Figure):
        cell = with_errors(value, digits, scale=metric.scale, unit=unit)
        is_endless = metric.name.startswith("agreement") and math.isinf(value.value)
        return replace(cell, text="to the end") if is_endless else cell
    return plain(value, digits)


def plain(value: float | None, digits: int | None = None) -> Cell:
    """A figure without errors, to so many digits after the point, or to three that count."""
    if value is None or math.isnan(value):
        return Cell(NOT_KNOWN)
    if abs(value) < NEGLIGIBLE_KLD:
        return Cell("0", value)
    return Cell(number(value, decimals(value, 3) if digits is None else digits), value)


def with_errors(
    figure: Figure | None, digits: int | None = None, *, scale: float = 1, unit: str = "", sign: str = ""
) -> Cell:
    """A figure with the error that takes tokens as independent, and the interval that does not.

    All have so many digits after the point, or as many as give the former two that count.
    """
    if figure is None or math.isnan(figure.value):
        return Cell(NOT_KNOWN)
    if abs(figure.value) < NEGLIGIBLE_KLD and figure.stderr is not None and figure.stderr < NEGLIGIBLE_KLD:
        return Cell("0", figure.value)
    digits = digits_of(figure, scale) if digits is None else digits
    errors = []
    if figure.stderr is not None:
        errors.append(f"± {number(scale * figure.stderr, digits)}")
    if figure.low is not None and figure.high is not None:
        errors.append(f"[{number(scale * figure.low, digits)}, {number(scale * figure.high, digits)}]")
    return Cell(number(scale * figure.value, digits, sign=sign) + unit, figure.value, tuple(errors))


def with_interval(figure: Figure, *, scale: float = 1, sign: str = "") -> Cell:
    """A figure with its interval and the digits that this leaves; with its error if there is no interval."""
    digits = None
    if figure.low is not None and figure.high is not None:
        digits = max(1, decimals(scale * (figure.high - figure.low) / 2, 1))
    cell = with_errors(figure, digits, scale=scale, sign=sign)
    return replace(cell, errors=cell.errors[-1:])


def digits_of(figure: Figure, scale: float) -> int:
    return decimals(scale * figure.stderr, 2) if figure.stderr else decimals(scale * figure.value, 3)


def decimals(size: float, significant: int) -> int:
    """Digits after the point that show so many of a number's own, eight at most."""
    if not size or not math.isfinite(size):
        return 0
    return min(8, max(0, significant - 1 - math.floor(math.log10(abs(size)))))


def number(value: float, digits: int, sign: str = "") -> str:
    """A number as a table has it, never in powers of ten."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else NOT_KNOWN
    return f"{value:{sign},.{digits}f}"
