"""The tables of a report: every figure as text, with its errors, and as the number that it is sorted by."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from scoremode.comparison.figures import Comparison, Figure, PairFigures, RunFigures

NOT_KNOWN = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure, or a name."""

    text: str
    value: float | None = None
    errors: tuple[str, ...] = ()
    mark: str = ""
    """A class of the style sheet."""

    @property
    def sort_value(self) -> str:
        """The value as JavaScript reads a number; empty where there is none."""
        return "" if self.value is None else str(self.value).replace("inf", "Infinity")


@dataclass(frozen=True, slots=True)
class Column:
    """Of the table of runs or of pairs."""

    name: str
    is_number: bool = True


def run_table(comparison: Comparison) -> tuple[list[Column], list[list[Cell]]]:
    """A row for each run, without the columns that no run has a figure for."""
    to_base = {pair.second.label: pair for pair in comparison.pairs_with_base}

    def pair_figure(figures: RunFigures, name: str) -> Figure | None:
        pair = to_base.get(figures.run.label)
        return None if pair is None else getattr(pair, name)

    cells: list[tuple[str, Callable[[RunFigures], Cell]]] = [
        ("bits per weight", lambda figures: plain(figures.run.bits_per_weight, 2)),
        ("MB", lambda figures: plain(_scaled(figures.run.weight_bytes, 1e-6), 1)),
        ("perplexity", lambda figures: with_errors(figures.perplexity, 4)),
        ("PPL ratio", lambda figures: with_errors(pair_figure(figures, "ppl_ratio"), 4)),
        ("bits per byte", lambda figures: with_errors(figures.bits_per_byte, 4)),
        ("mean KL", lambda figures: with_errors(figures.kld)),
        ("median KL", lambda figures: plain(figures.kld_median)),
        ("99% KL", lambda figures: plain(figures.kld_p99)),
        ("max KL", lambda figures: plain(figures.kld_max)),
        ("same top p", lambda figures: with_errors(figures.same_top_p, 2, percent=True)),
        ("times the floor", lambda figures: plain(figures.kld_over_noise_floor, 1)),
    ]
    rows = [[Cell(figures.run.label), *(cell(figures) for _, cell in cells)] for figures in comparison.runs]
    used = [0] + [place for place in range(1, len(cells) + 1) if any(row[place].text != NOT_KNOWN for row in rows)]
    columns = [Column("run", is_number=False), *(Column(name) for name, _ in cells)]
    return [columns[place] for place in used], [[row[place] for place in used] for row in rows]


def pair_table(comparison: Comparison) -> tuple[list[Column], list[list[Cell]]]:
    """A row for each pair."""
    has_kld = any(pair.kld_difference is not None for pair in comparison.pairs)
    columns = [
        Column("first", is_number=False),
        Column("second", is_number=False),
        Column("by perplexity", is_number=False),
        Column("PPL ratio"),
        Column("PPL difference"),
        Column("ln ratio"),
        *([Column("by mean KL", is_number=False), Column("KL difference")] if has_kld else []),
    ]
    return columns, [_pair_row(pair, has_kld) for pair in comparison.pairs]


def _pair_row(pair: PairFigures, has_kld: bool) -> list[Cell]:
    row = [
        Cell(pair.first.label),
        Cell(pair.second.label),
        _verdict(pair.verdict),
        with_errors(pair.ppl_ratio, 4),
        with_errors(pair.ppl_difference, 4),
        with_errors(pair.ln_ppl_ratio),
    ]
    return [*row, _verdict(pair.kld_verdict), with_errors(pair.kld_difference)] if has_kld else row


def _verdict(verdict: str | None) -> Cell:
    return Cell(verdict or NOT_KNOWN, mark=verdict if verdict in ("better", "worse") else "")


def plain(value: float | None, digits: int | None = None) -> Cell:
    """A figure without errors, to so many digits after the point, or to three that count."""
    return Cell(NOT_KNOWN) if value is None or math.isnan(value) else Cell(_number(value, digits), value)


def with_errors(figure: Figure | None, digits: int | None = None, *, percent: bool = False) -> Cell:
    """A figure with the error that takes tokens as independent, and the interval that does not."""
    if figure is None or math.isnan(figure.value):
        return Cell(NOT_KNOWN)
    scale, unit = (100, "%") if percent else (1, "")
    errors = []
    if figure.stderr is not None:
        errors.append(f"± {_number(scale * figure.stderr, digits)}")
    if figure.low is not None and figure.high is not None:
        errors.append(f"[{_number(scale * figure.low, digits)}, {_number(scale * figure.high, digits)}]")
    return Cell(_number(scale * figure.value, digits) + unit, figure.value, tuple(errors))


def _number(value: float, digits: int | None) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else NOT_KNOWN
    return f"{value:.3g}" if digits is None else f"{value:,.{digits}f}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
