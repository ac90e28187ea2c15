"""Makes the tables of a report: each figure as text with its errors, and as a number for sorting."""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scoremode._texts import Column, printable
from scoremode.comparison.agreement import agreement_of, has_stopped
from scoremode.comparison.figures import (
    METRICS,
    NOT_KNOWN,
    OPPOSITE,
    Cell,
    Figure,
    Metric,
    PairFigures,
    RunComparison,
    Verdict,
    cell_of,
    digits_of,
    with_errors,
)
from scoremode.comparison.run_file import RunFile
from scoremode.wire import TokenTexts

NUM_PARTED = 10
"""How many answers the report lists for a run: those that part first."""
_FAR_FEWER = 2
"""If the digits after the point in a column differ by this many, each figure has its own number of digits."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A table that compares every run with every other. The verdicts in a row are on the row's run."""

    name: str
    labels: list[str]
    rows: list[list[Cell]]


def run_table(comparison: RunComparison) -> tuple[list[str], list[list[Cell]]]:
    """The names of columns, and one row per run, its label first. Columns that are empty for all runs are left out."""
    shown = [metric for metric in METRICS.values() if metric.report_heading]
    columns = {metric.report_heading: _column(comparison, metric) for metric in shown}
    used = {name: column for name, column in columns.items() if any(cell.text != NOT_KNOWN for cell in column)}
    labels = [Cell(row.run.label) for row in comparison.rows]
    return ["run", *used], [list(row) for row in zip(labels, *used.values(), strict=True)]


def _column(comparison: RunComparison, metric: Metric) -> list[Cell]:
    values = [row.value(metric.name) for row in comparison.rows]
    if metric.name == "delta_p_rms":
        # Show 0 for a model that does not diverge: the root would enlarge a negligible difference.
        nothing = Figure(0.0, None, None, None)
        values = [
            nothing if row.has_no_divergence and value is not None else value
            for row, value in zip(comparison.rows, values, strict=True)
        ]
    digits = metric.digits if metric.has_fixed_digits else None
    finest = [digits_of(value, metric.scale) for value in values if isinstance(value, Figure)]
    if not metric.has_fixed_digits and finest and max(finest) - min(finest) < _FAR_FEWER:
        # Show all figures with the digits of the most precise one.
        digits = max(finest)
    return [cell_of(metric, value, digits, metric.unit) for value in values]


def parted_answers(run: RunFile) -> list[Column]:
    """Make columns of the answers that part first from a run's, with both models' tokens at that place."""
    texts, agreement, ends = (
        TokenTexts(run.token_texts, run.token_bytes),
        agreement_of(run),
        np.cumsum(run.window_sizes),
    )
    starts = ends - run.window_sizes
    assert run.window_documents is not None
    assert run.top_token_ids is not None
    assert run.reference_top_token_ids is not None
    order = np.argsort(agreement.lengths, kind="stable")
    windows = order[agreement.parts[order]][:NUM_PARTED]
    at = (starts + agreement.lengths)[windows]
    before = [run.token_ids[max(start, end - 16) : end] for start, end in zip(starts[windows], at, strict=True)]
    original = np.where(at == ends[windows], "the end", "")
    own = np.where(original == "", np.where(np.append(has_stopped(run), False)[at], "the end", ""), "another token")
    next_ids = {
        "next in the answer": (run.token_ids, original),
        "original's top token": (run.reference_top_token_ids, original),
        "its top token": (run.top_token_ids, own),
    }
    return [
        Column("prompt", [f"{row + 1:,}" for row in run.window_documents[windows]]),
        Column("same for", [f"{length:,}" for length in agreement.lengths[windows]]),
        Column("answer before", [printable(texts.joined(tokens)) for tokens in before], right=False),
        *(
            # `end` is set at the end of an answer, where there is no token.
            Column(
                name,
                [end or f"“{printable(texts.joined([ids[place]]))}”" for place, end in zip(at, ends, strict=True)],
                right=False,
            )
            for name, (ids, ends) in next_ids.items()
        ),
    ]


def pair_matrices(comparison: RunComparison) -> list[Matrix]:
    """Matrices of perplexity ratios, and of differences in mean KL divergence if there are any; empty for one run."""
    ratios: dict[tuple[str, str], Cell] = {}
    differences: dict[tuple[str, str], Cell] = {}
    for pair in comparison.pairs:
        ratio, more = pair.ppl_ratio, pair.kld_difference
        inverse = ratio.mapped(_inverse, _inverse(ratio.value) ** 2)
        ratios |= _pair_cells(pair, pair.verdict, "perplexity", "times", (ratio, inverse))
        if more is not None and pair.kld_verdict is not None:
            both = (more, more.mapped(operator.neg, 1))
            differences |= _pair_cells(pair, pair.kld_verdict, "mean KL divergence", "nats", both, sign="+")
    labels = [run.label for run in comparison.files]
    # Leave out the reference's own model: every other model diverges more.
    diverging = [figures.run.label for figures in comparison.runs if not figures.has_no_divergence]
    by_ratio = Matrix("Perplexity of the run over that of the other", labels, _rows(labels, ratios))
    if len(diverging) < 2 or not differences:
        return [by_ratio] if ratios else []
    name = "Mean KL divergence of the run minus that of the other"
    return [by_ratio, Matrix(name, diverging, _rows(diverging, differences))]


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _rows(labels: list[str], cells: Mapping[tuple[str, str], Cell]) -> list[list[Cell]]:
    """The rows of a matrix, given its cells by the labels of row and column."""
    return [[cells.get((row, column), Cell(NOT_KNOWN if row != column else "")) for column in labels] for row in labels]


def _pair_cells(
    pair: PairFigures, verdict: Verdict, by: str, unit: str, figures: tuple[Figure, Figure], sign: str = ""
) -> dict[tuple[str, str], Cell]:
    """Make a pair's two cells: the second run's, which the verdict is on, and the first run's."""
    ways = ((pair.second.label, pair.first.label, verdict), (pair.first.label, pair.second.label, OPPOSITE[verdict]))
    cells = {}
    for (run, other, run_verdict), figure in zip(ways, figures, strict=True):
        shown, words = with_errors(figure, sign=sign), pair.in_words(run_verdict)
        mark = words if words in ("better", "worse") else ""
        result = f"{run} is {mark} than {other}" if mark else f"{run} against {other}"
        tip = f"{result} by {by}: {' '.join((f'{shown.text} {unit}', *shown.errors))}"
        cells[run, other] = Cell(shown.text, shown.value, shown.errors[1:], mark=mark, tip=tip)
    return cells
