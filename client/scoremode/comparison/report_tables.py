"""The tables of a report: every figure as text, with its errors, and as the number that it is sorted by."""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from scoremode.comparison.figures import NEGLIGIBLE_KLD, OPPOSITE, Figure, PairFigures, RunComparison, Verdict
from scoremode.kld import MOST_FLOORS

NOT_KNOWN = "-"
_MAX_DECIMALS = 8
_FAR_FEWER = 2
"""From this many digits of difference after the point, the figures of a column each keep their own digits."""


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
    def sort_value(self) -> str:
        """The value as JavaScript reads a number; empty where there is none."""
        return "" if self.value is None else str(self.value).replace("inf", "Infinity")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Every run against every other: a row is of the run that the verdicts are on."""

    name: str
    labels: list[str]
    rows: list[list[Cell]]


def run_table(comparison: RunComparison) -> tuple[list[str], list[list[Cell]]]:
    """Names of columns, and a row for each run, its label first, without the columns that no run has a figure for."""
    runs = comparison.rows
    nothing = Figure(0.0, None, None, None)
    to_base = {pair.second.label: pair.ppl_ratio for pair in comparison.pairs_with_base}
    cells = {
        "GiB": [plain(figures.run.gib, 3) for figures in runs],
        "bits per weight": [plain(figures.run.bits_per_weight, 2) for figures in runs],
        "perplexity": _column([figures.perplexity for figures in runs]),
        "PPL ratio": _column([to_base.get(figures.run.label) for figures in runs]),
        "bits per byte": _column([figures.bits_per_byte for figures in runs]),
        "mean KL": _column([figures.kld for figures in runs]),
        "median KL": [plain(figures.kld_median) for figures in runs],
        "99% KL": [plain(figures.kld_p99) for figures in runs],
        "99.9% KL": [plain(figures.kld_p999) for figures in runs],
        "max KL": [plain(figures.kld_max) for figures in runs],
        # Of a model that does not diverge, 0: the root would show what its divergence does not.
        "RMS Δp": _column([nothing if each.has_no_divergence else each.delta_p_rms for each in runs], 100, "%"),
        "same top p": _column([figures.same_top_p for figures in runs], 100, "%"),
        "times the floor": [floors(figures.kld_over_noise_floor) for figures in runs],
    }
    used = {name: column for name, column in cells.items() if any(cell.text != NOT_KNOWN for cell in column)}
    labels = [Cell(figures.run.label) for figures in runs]
    return ["run", *used], [list(row) for row in zip(labels, *used.values(), strict=True)]


def _column(figures: list[Figure | None], scale: float = 1, unit: str = "") -> list[Cell]:
    """With the digits of the finest of them, unless others need far fewer."""
    digits = [_digits(figure, scale) for figure in figures if figure is not None]
    common = max(digits) if digits and max(digits) - min(digits) < _FAR_FEWER else None
    return [with_errors(figure, common, scale=scale, unit=unit) for figure in figures]


def effects(comparison: RunComparison) -> list[tuple[str, list[Cell]]]:
    """The label of each run but the base, and what it adds to the perplexity, how far it diverges, and its size."""
    pairs = {pair.second.label: pair for pair in comparison.pairs_with_base}
    found = []
    for figures in comparison.runs:
        pair, label = pairs.get(figures.run.label), figures.run.label
        if pair is not None:
            parts = [Cell(f"{_percent_more(pair.ppl_ratio)} PPL", mark=_mark(pair.verdict))]
        elif not comparison.pairs and (change := comparison.ppl_change(figures.run)) is not None:
            shown = with_errors(change, scale=100, sign="+")
            parts = [Cell(" ".join((shown.text, *shown.errors, "% PPL")))]
        else:
            continue
        if figures.kld is not None:
            parts.append(Cell(f"KLD {plain(figures.kld.value).text}"))
        if figures.same_top_p is not None:
            parts.append(Cell(f"{figures.same_top_p.value:.1%} same top"))
        if pair is not None and figures.run.gib and comparison.base.gib:
            parts.append(Cell(f"{figures.run.gib / comparison.base.gib:.0%} of the size"))
        found.append((label, parts))
    return found


def _percent_more(ratio: Figure) -> str:
    if not math.isfinite(ratio.value):
        return number(ratio.value, 0)
    if ratio.low is None or ratio.high is None:
        digits, interval = _decimals(100 * (ratio.stderr or 0), 2), ""
    else:
        digits = _decimals(50 * (ratio.high - ratio.low), 2)
        interval = f" [{number(100 * (ratio.low - 1), digits)}, {number(100 * (ratio.high - 1), digits)}]"
    return f"{number(100 * (ratio.value - 1), digits, sign='+')} %{interval}"


def pair_matrices(comparison: RunComparison) -> list[Matrix]:
    """Perplexity ratios, and differences of mean KL divergence where there are any; none of one run alone."""
    ratios: dict[tuple[str, str], Cell] = {}
    differences: dict[tuple[str, str], Cell] = {}
    for pair in comparison.pairs:
        ratio, more = pair.ppl_ratio, pair.kld_difference
        inverse = ratio.mapped(_inverse, _inverse(ratio.value) ** 2)
        ratios |= _pair_cells(pair, pair.verdict, "perplexity", "times", (ratio, inverse))
        if more is not None and pair.kld_verdict is not None:
            both = (more, more.mapped(operator.neg, 1))
            differences |= _pair_cells(pair, pair.kld_verdict, "mean KL divergence", "nats", both, sign="+")
    labels = [figures.run.label for figures in comparison.runs]
    # Any model diverges more than the reference's own.
    diverging = [figures.run.label for figures in comparison.runs if not figures.has_no_divergence]
    by_ratio = Matrix("Perplexity of the run over that of the other", labels, _rows(labels, ratios))
    if len(diverging) < 2 or not differences:
        return [by_ratio] if ratios else []
    name = "Mean KL divergence of the run less that of the other"
    return [by_ratio, Matrix(name, diverging, _rows(diverging, differences))]


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _rows(labels: list[str], cells: Mapping[tuple[str, str], Cell]) -> list[list[Cell]]:
    """Of cells by the labels of row and column."""
    return [[cells.get((row, column), Cell(NOT_KNOWN if row != column else "")) for column in labels] for row in labels]


def _pair_cells(
    pair: PairFigures, verdict: Verdict, by: str, unit: str, figures: tuple[Figure, Figure], sign: str = ""
) -> dict[tuple[str, str], Cell]:
    """Both ways round: of the second run, which the verdict is on, and of the first."""
    ways = ((pair.second.label, pair.first.label, verdict), (pair.first.label, pair.second.label, OPPOSITE[verdict]))
    cells = {}
    for (run, other, of_run), figure in zip(ways, figures, strict=True):
        shown, mark = with_errors(figure, sign=sign), _mark(of_run)
        said = f"{run} is {of_run} than {other}" if mark else f"No difference is shown between {run} and {other}"
        tip = f"{said} by {by}: {' '.join((f'{shown.text} {unit}', *shown.errors))}"
        cells[run, other] = Cell(shown.text, shown.value, mark=mark, tip=tip)
    return cells


def _mark(verdict: Verdict) -> str:
    return "" if verdict == "no difference shown" else verdict


def plain(value: float | None, digits: int | None = None) -> Cell:
    """A figure without errors, to so many digits after the point, or to three that count."""
    if value is None or math.isnan(value):
        return Cell(NOT_KNOWN)
    if abs(value) < NEGLIGIBLE_KLD:
        return Cell("0", value)
    return Cell(number(value, _decimals(value, 3) if digits is None else digits), value)


def floors(multiple: float | None) -> Cell:
    """A divergence as a multiple of the noise floor."""
    return Cell(f"> {MOST_FLOORS:,}", multiple) if multiple and multiple > MOST_FLOORS else plain(multiple, 1)


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
    digits = _digits(figure, scale) if digits is None else digits
    errors = []
    if figure.stderr is not None:
        errors.append(f"± {number(scale * figure.stderr, digits)}")
    if figure.low is not None and figure.high is not None:
        errors.append(f"[{number(scale * figure.low, digits)}, {number(scale * figure.high, digits)}]")
    return Cell(number(scale * figure.value, digits, sign=sign) + unit, figure.value, tuple(errors))


def _digits(figure: Figure, scale: float) -> int:
    return _decimals(scale * figure.stderr, 2) if figure.stderr else _decimals(scale * figure.value, 3)


def _decimals(size: float, significant: int) -> int:
    """Digits after the point that show so many of a number's own."""
    if not size or not math.isfinite(size):
        return 0
    return min(_MAX_DECIMALS, max(0, significant - 1 - math.floor(math.log10(abs(size)))))


def number(value: float, digits: int, sign: str = "") -> str:
    """A number as a table has it, never in powers of ten."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else NOT_KNOWN
    return f"{value:{sign},.{digits}f}"
