"""The figures of compared runs, and their presentation in all forms: headings, digits, units and cells."""

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
    """A value with its standard error and its interval."""

    value: float
    stderr: float | None
    """Standard error that takes tokens as independent, as llama.cpp does; None if it is not defined."""
    low: float | None
    """`low` and `high` are the 95 % interval, which takes neighboring tokens as dependent. Both are None if it cannot
    be computed, or all resamples are equal."""
    high: float | None

    def mapped(self, function: Callable[[float], float], slope: float | None) -> "Figure":
        """Apply a monotonic function to the value and the interval; its absolute slope, `slope`, scales `stderr`."""
        stderr = None if self.stderr is None or slope is None else slope * self.stderr
        if self.low is None or self.high is None:
            return Figure(function(self.value), stderr, None, None)
        return Figure(function(self.value), stderr, *sorted((function(self.low), function(self.high))))


@dataclass(frozen=True, slots=True)
class Metric:
    """The presentation of one figure of a run, in all forms of a comparison."""

    name: str
    """Name of the attribute of `RunFigures`, or of the run, that has the value. CSV files use it too."""
    heading: str
    """Heading in text."""
    report_heading: str
    """Heading in the report; empty for a figure that the report leaves out."""
    digits: int
    """Decimals in text. The report shows as many as are significant, given the error."""
    unit: str = ""
    """Unit after values in the report; `%` if the value is a share."""
    of_run: bool = False
    """Whether the value is an attribute of the run, such as the size of its weights, and so has no error."""
    has_fixed_digits: bool = False
    """Whether the report uses `digits` too."""

    @property
    def scale(self) -> int:
        """The factor from the value to the number that is shown."""
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
        Metric("same_experts", "same experts, %", "same experts", 3, "%"),
        Metric("forced_kld", "forced KLD, nats", "", 6),
        Metric("rerouting", "rerouting, nats", "", 6),
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
"""All metrics, in the order of the report's columns: a phone shows the first ones. docs/compare.md,
docs/kld.md and docs/agreement.md describe them."""


_FROM_THE_REFERENCE = {name for name in METRICS if name.startswith(("kld", "delta_p", "same_", "forced", "rerouting"))}


@dataclass(frozen=True, slots=True)
class EngineLog:
    """A run of llama.cpp. Figures that its log does not have are None."""

    path: Path
    label: str
    base_perplexity: float | None
    """Perplexity of the base that the run was compared with."""
    file_type: str | None
    bits_per_weight: float | None
    gib: float | None
    """Size of the weights in GiB."""
    num_windows: int
    context_length: int

    @property
    def weights(self) -> str:
        return ", ".join(filter(None, ("llama.cpp", self.file_type)))


M = TypeVar("M", bound=RunFile | EngineLog, covariant=True, default=RunFile)


@dataclass(frozen=True)
class RunFigures(Generic[M]):
    """One run's figures, over the text or a group of its targets. Figures that need a reference are None for a run
    without one."""

    run: M
    nll: Figure
    """Mean NLL, nats per token."""
    perplexity: Figure
    bits_per_byte: Figure | None = None
    kld: Figure | None = None
    """Mean KL divergence from the reference, nats."""
    kld_median: float | None = None
    kld_p95: float | None = None
    """The 95 % quantile of KL divergence; `kld_p99` and `kld_p999` are the 99 % and 99.9 % quantiles."""
    kld_p99: float | None = None
    kld_p999: float | None = None
    kld_max: float | None = None
    delta_p_rms: Figure | None = None
    """Root mean square of the change in the probabilities of the text's tokens."""
    same_top_p: Figure | None = None
    """Share of positions with the reference's top token."""
    same_experts: Figure | None = None
    """Share of positions and layers with the reference's set of experts; None if experts were not compared."""
    forced_kld: Figure | None = None
    """Mean KL divergence with the reference's experts, in nats: that of rounding."""
    rerouting: Figure | None = None
    """Mean KL divergence minus `forced_kld`, paired by position; None too if a divergence is infinite."""
    kld_over_noise_floor: float | None = None
    """Mean KL divergence divided by the noise floor, the mean KL divergence of the reference's model from itself."""
    agreement_median: Figure | None = None
    """For a reference of greedy answers, the median number of tokens for which answers are the same; infinite if more
    than half of them never differ. `agreement_p25`, `agreement_p75` and `agreement_p10` are other quantiles."""
    agreement_p25: Figure | None = None
    agreement_p75: Figure | None = None
    agreement_p10: Figure | None = None
    agreement_share: Figure | None = None
    """Share of answers that are the same to their end."""
    agreement_ties: float | None = None
    """How often the recorded token has the run's highest logit and another token has the same, up to and with each
    answer's first difference, summed over answers."""
    agreement_floor: Figure | None = None
    """`agreement_median` of the reference's own model in the run's lane. `agreement_floor_share` is that model's
    `agreement_share`."""
    agreement_floor_share: Figure | None = None
    expected_agreement: Figure | None = None
    """For a reference of sampled answers, the mean number of tokens that both models would sample alike, if their
    samplers were coupled to agree as long as possible (docs/agreement.md)."""
    ppl_ratio: Figure | None = None
    """Perplexity divided by the base's, paired by token; None for the base itself."""

    @property
    def ppl_change(self) -> Figure | None:
        """The change of perplexity as a share of the base's; None for the base itself."""
        return None if self.ppl_ratio is None else self.ppl_ratio.mapped(lambda ratio: ratio - 1, 1)

    def value(self, name: str) -> Any:
        """The `Figure` or number of a metric. None if it is not known, or would only say that the base does not differ
        from itself."""
        if self.has_no_divergence and self.ppl_ratio is None and name in _FROM_THE_REFERENCE:
            return None
        return getattr(self.run if METRICS[name].of_run else self, name)

    @property
    def has_no_divergence(self) -> bool:
        """Whether the divergence is too small to show, as for the reference's own model."""
        return self.kld is not None and self.kld.value < NEGLIGIBLE_KLD


@dataclass(frozen=True, slots=True)
class PairFigures:
    """The difference between two runs, position by position: `second` minus `first`."""

    first: RunFile
    second: RunFile
    ln_ppl_ratio: Figure
    """Difference of mean NLLs, in nats."""
    ppl_ratio: Figure
    ppl_difference: Figure
    kld_difference: Figure | None
    """Difference of mean KL divergences; None unless both runs have the same reference."""
    verdict: Verdict
    """The verdict on `second` by NLL. No difference is shown if the interval of `ln_ppl_ratio` contains 0, or stays
    within `LEAST_LN_RATIO` of 0. A text that is too short, or an infinite NLL, gives no interval. If all resamples are
    equal, the value decides."""
    kld_verdict: Verdict | None
    """The verdict on `second` by `kld_difference`; None without it. No difference is shown, too, if both runs' mean KL
    divergences are at most the noise floor."""

    @property
    def has_original(self) -> bool:
        """Whether one of the runs is the original. On enough text every quantization differs from it, so a verdict
        would say nothing. Without a reference, an unquantized model is the original of a quantized one."""
        runs = (self.first, self.second)
        references = [run.reference for run in runs if run.reference is not None]
        if references:
            return any(reference.is_of(run.server) for reference in references for run in runs)
        return (self.first.server.quantization is None) != (self.second.server.quantization is None)

    def in_words(self, verdict: Verdict | None) -> str:
        """Format a verdict for tables: `-` in a comparison with the original, unless there is no interval."""
        return NOT_KNOWN if verdict is None or (self.has_original and verdict != "no interval") else verdict


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All runs, the base first and the others in the order given, and every pair of them, the earlier run first."""

    runs: list[RunFigures]
    pairs: list[PairFigures]
    num_resamples: int
    seed: int
    blocks: str
    """How the resamples were drawn, or why there are none, as a phrase."""
    has_intervals: bool
    groups: Sequence[tuple[TokenGroup, RunFigures]] = ()
    """Each run's figures over each group of tokens; empty if the text has no groups."""
    logs: Sequence[RunFigures[EngineLog]] = ()
    """llama.cpp's runs on the same text, without values of single tokens."""
    warnings: Sequence[str] = ()
    """Warnings about the choice of the base."""
    size: Size = "gib"
    """The measure of size in plots and in the table of the best at each size, if it is known."""
    chosen_base: str | None = None
    """Label of the base, if it was chosen by label."""
    max_kld: float | None = None
    """The tolerance for the mean KL divergence, in nats; None if not given."""
    max_ppl_increase: float | None = None
    """The tolerance for the increase of perplexity over the base's, in percent; None if not given."""
    tasks: "TaskComparison | None" = None
    """Accuracies on tasks, which the report and the card show as well."""

    @property
    def rows(self) -> list[RunFigures[RunFile | EngineLog]]:
        """The figures of runs and logs, one table row each."""
        return [*self.runs, *self.logs]

    @property
    def files(self) -> list[RunFile]:
        """The compared runs, without their figures."""
        return [figures.run for figures in self.runs]

    @property
    def base(self) -> RunFile:
        """The first run, which the others are compared with."""
        return self.runs[0].run

    @property
    def base_pairs(self) -> dict[str, PairFigures]:
        """The pairs with the base, by the label of the other run."""
        # Pairs with the base come first.
        return {pair.second.label: pair for pair in self.pairs[: len(self.runs) - 1]}

    def intervals_in_words(self, beginning: str) -> str:
        """A sentence on how intervals were computed, which begins with `beginning`; if there are none, a sentence that
        says why."""
        if not self.has_intervals:
            return f"{self.blocks.capitalize()}."
        return f"{beginning}: {self.blocks}, {self.num_resamples:,} resamples."

    def command(self, *options: str) -> str:
        """The command that compares these runs again, in the folder of their files. If a label has a comma, all labels
        are left out."""
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
        """The description of the text, which is the same for all runs, from the first run that has it."""
        return next((run.corpus for run in self.files if run.corpus is not None), None)

    @property
    def answers_in_words(self) -> str:
        """Describe the answers that were compared in addition to the text; empty if there are none."""
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
    """Text that the page shows on demand."""

    @property
    def in_text(self) -> str:
        """The value and its errors, for a terminal."""
        return " ".join((self.text, *self.errors)).replace("∞", "inf")

    @property
    def sort_value(self) -> str:
        """The value as a number in JavaScript; empty if there is none."""
        return "" if self.value is None else str(self.value).replace("inf", "Infinity")


def cell_of(metric: Metric, value: Figure | float | None, digits: int | None, unit: str = "") -> Cell:
    """Format a value with its errors and `digits` digits after the point; None shows as many as are significant."""
    if isinstance(value, Figure):
        cell = with_errors(value, digits, scale=metric.scale, unit=unit)
        is_endless = metric.name.startswith("agreement") and math.isinf(value.value)
        return replace(cell, text="to the end") if is_endless else cell
    return plain(value, digits)


def plain(value: float | None, digits: int | None = None) -> Cell:
    """Format a value without errors, with `digits` digits after the point, or by default three significant digits."""
    if value is None or math.isnan(value):
        return Cell(NOT_KNOWN)
    if abs(value) < NEGLIGIBLE_KLD:
        return Cell("0", value)
    return Cell(number(value, decimals(value, 3) if digits is None else digits), value)


def with_errors(
    figure: Figure | None, digits: int | None = None, *, scale: float = 1, unit: str = "", sign: str = ""
) -> Cell:
    """Format a figure with its standard error and its interval, all to the same number of digits after the point.

    Without `digits`, the standard error has two significant digits.
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
    """Format a figure with its interval, or its standard error without one, and as many digits as are significant."""
    digits = None
    if figure.low is not None and figure.high is not None:
        digits = max(1, decimals(scale * (figure.high - figure.low) / 2, 1))
    cell = with_errors(figure, digits, scale=scale, sign=sign)
    return replace(cell, errors=cell.errors[-1:])


def digits_of(figure: Figure, scale: float) -> int:
    return decimals(scale * figure.stderr, 2) if figure.stderr else decimals(scale * figure.value, 3)


def decimals(size: float, significant: int) -> int:
    """How many digits after the point show this many significant digits of a number; at most eight."""
    if not size or not math.isfinite(size):
        return 0
    return min(8, max(0, significant - 1 - math.floor(math.log10(abs(size)))))


def number(value: float, digits: int, sign: str = "") -> str:
    """Format a number for a table, never in powers of ten."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else NOT_KNOWN
    return f"{value:{sign},.{digits}f}"
