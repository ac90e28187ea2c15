"""A comparison as text for a terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Generic, TypeVar

from scoremode.comparison.bootstrap import MIN_UNITS
from scoremode.comparison.compare import (
    Figure,
    GroupFigures,
    Measured,
    PairFigures,
    RunComparison,
    RunFigures,
    ppl_change,
)
from scoremode.comparison.report_tables import Cell, floors, plain, with_errors
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import summary
from scoremode.runs.presets import comparable_with

Row = TypeVar("Row")

CsvRow = dict[str, object]
_CSV_HEADER = (
    *("run", "beside", "quantization", "dtype", "figure", "value", "stderr", "low", "high", "verdict"),
    *("path", "corpus", "corpus_sha256", "figures", "model", "revision", "versions", "device", "finished", "task"),
    *("by", "group"),
)


def as_text(comparison: RunComparison) -> str:
    """Several tables, so that each fits in 120 columns where labels are short, and the summary."""
    return paragraphs(
        _settings(comparison),
        *(aligned(section, comparison.rows) for section in _run_sections(comparison)),
        *(aligned(section, comparison.pairs) for section in _pair_sections(comparison)),
        *(aligned(section, rows) for sections, rows in group_tables(comparison) for section in sections),
        group_notes(comparison),
        summary(comparison),
    )


def as_markdown(comparison: RunComparison) -> str:
    """A table of runs, one of pairs, and the summary, as GitHub shows them."""
    return paragraphs(
        markdown_rows(_merged(_run_sections(comparison)), comparison.rows),
        markdown_rows(_merged(_pair_sections(comparison)), comparison.pairs),
        *(markdown_rows(_merged(sections), rows) for sections, rows in group_tables(comparison)),
        group_notes(comparison),
        [f"- {escaped(sentence)}" for sentence in summary(comparison)],
        [escaped(" ".join(_settings(comparison)))],
    )


def paragraphs(*parts: Sequence[str]) -> str:
    """Lines with an empty one between two parts, of which empty ones are left out."""
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def as_csv(comparison: RunComparison | None, accuracies: Iterable[CsvRow] = ()) -> str:
    """One line per figure, in full precision. A pair's `run` is the second, `beside` the first.

    Args:
        comparison: Of runs, if there are any.
        accuracies: More rows, by the names of columns.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, _CSV_HEADER, lineterminator="\n")
    writer.writeheader()
    if comparison is not None:
        for figures in comparison.runs:
            run = figures.run
            sizes = {"weight_bytes": run.server.weight_bytes, "num_parameters": run.server.num_parameters}
            for name, value in {**sizes, "bits_per_weight": run.bits_per_weight, **figures.known}.items():
                writer.writerows(_csv_rows(run, "", name, value))
        for log in comparison.logs:
            for name, value in {"bits_per_weight": log.run.bits_per_weight, **log.known}.items():
                if value is not None:
                    labels = {"run": log.run.label, "quantization": log.run.weights, "figure": name}
                    writer.writerow(labels | (asdict(value) if isinstance(value, Figure) else {"value": value}))
        for pair in comparison.pairs:
            verdicts = {"ln_ppl_ratio": pair.verdict, "ppl_ratio": pair.verdict, "ppl_difference": None}
            for name, verdict in {**verdicts, "kld_difference": pair.kld_verdict}.items():
                writer.writerows(_csv_rows(pair.second, pair.first.label, name, getattr(pair, name), verdict))
        for each in comparison.groups:
            part = {"by": each.group.by, "group": each.group.name}
            for name, value in each.known.items():
                beside = comparison.base.label if name == "ppl_ratio" else ""
                writer.writerows(row | part for row in _csv_rows(each.run, beside, name, value))
    writer.writerows(accuracies)
    return file.getvalue()


def _csv_rows(
    run: RunFile, beside: str, figure: str, value: Figure | float | None, verdict: str | None = None
) -> Iterator[CsvRow]:
    """None where there is no value."""
    if value is None:
        return
    corpus = run.corpus
    yield {
        **{"run": run.label, "beside": beside, "quantization": run.server.quantization, "dtype": run.server.dtype},
        **{"figure": figure, "verdict": verdict, "path": run.path},
        **(asdict(value) if isinstance(value, Figure) else {"value": value}),
        "corpus": None if corpus is None else corpus.in_words,
        "corpus_sha256": None if corpus is None else corpus.sha256,
        "figures": comparable_with(corpus, run.context_length),
        **{"model": run.model, "revision": run.server.revision, "versions": run.versions},
        **{"device": run.server.devices, "finished": run.finished},
    }


@dataclass(frozen=True, slots=True)
class TextColumn(Generic[Row]):
    """A column of a table, in text or in Markdown."""

    header: str
    cell: Callable[[Row], str]
    right: bool = True
    """Whether it is set flush right."""


def _settings(comparison: RunComparison) -> list[str]:
    run, corpus = comparison.base, comparison.corpus
    return [
        f"{run.num_scored:,} tokens{'' if corpus is None else f' of {corpus.in_words}'}.",
        f"{run.num_windows:,} windows: {run.method}, context length {run.context_length:,}, stride {run.stride:,}; "
        f"{comparable_with(corpus, run.context_length)}.",
        f"{measured_by(comparison)}.",
        "± takes tokens as independent. [95 % interval] does not:",
        f"{comparison.num_resamples:,} resamples, {comparison.blocks}, seed {comparison.seed}.",
    ]


def measured_by(comparison: RunComparison) -> str:
    """Versions, GPUs and days of the runs."""
    runs = [figures.run for figures in comparison.runs]
    days = sorted({run.finished[:10] for run in runs if run.finished})
    span = " to ".join(sorted({*days[:1], *days[-1:]}))
    parts = [*(run.versions for run in runs), *(run.server.devices for run in runs), span]
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _run_sections(comparison: RunComparison) -> list[list[TextColumn[RunFigures[Measured]]]]:
    base = comparison.base.label
    ratios = {pair.second.label: pair.ppl_ratio for pair in comparison.pairs_with_base}
    change = ppl_change(comparison, comparison.base)
    if not comparison.pairs and change is not None and comparison.base_reference is not None:
        ratios = {base: replace(change, value=1 + change.value)}
        base = f"the reference {comparison.base_reference.name}"
    label: TextColumn[RunFigures[Measured]] = TextColumn("run", lambda row: row.run.label, right=False)
    sections: list[list[TextColumn[RunFigures[Measured]]]] = [
        [
            label,
            TextColumn("weights", lambda row: row.run.weights, right=False),
            TextColumn("GiB", lambda row: _number(row.run.gib, 3)),
            TextColumn("bits per weight", lambda row: _number(row.run.bits_per_weight, 2)),
            TextColumn("bits per byte", lambda row: _figure(row.bits_per_byte, 4)),
        ],
        [
            label,
            TextColumn("perplexity", lambda row: _figure(row.perplexity, 4)),
            TextColumn(f"over that of {base}", lambda row: _figure(ratios.get(row.run.label), 4)),
        ],
        [
            label,
            TextColumn("mean KLD, nats", lambda row: _figure(row.kld, 6)),
            TextColumn("same top p, %", lambda row: _figure(row.same_top_p, 3, 100)),
            TextColumn("times the floor", lambda row: floors(row.kld_over_noise_floor).text),
        ],
        [
            label,
            TextColumn("median KLD", lambda row: _number(row.kld_median, 6)),
            TextColumn("95 %", lambda row: _number(row.kld_p95, 4)),
            TextColumn("99 %", lambda row: _number(row.kld_p99, 4)),
            TextColumn("99.9 %", lambda row: _number(row.kld_p999, 4)),
            TextColumn("max KLD", lambda row: _number(row.kld_max, 4)),
            TextColumn("RMS Δp, %", lambda row: _figure(row.delta_p_rms, 3, 100)),
        ],
    ]
    return sections if any(figures.kld is not None for figures in comparison.rows) else sections[:2]


def _pair_sections(comparison: RunComparison) -> list[list[TextColumn[PairFigures]]]:
    if not comparison.pairs:
        return []
    labels: list[TextColumn[PairFigures]] = [
        TextColumn("run", lambda row: row.second.label, right=False),
        TextColumn("compared with", lambda row: row.first.label, right=False),
    ]
    ratio: TextColumn[PairFigures] = TextColumn("perplexity ratio", lambda row: _figure(row.ppl_ratio, 4))
    sections = [[*labels, ratio, TextColumn("by perplexity", lambda row: row.verdict, right=False)]]
    if any(pair.kld_difference is not None for pair in comparison.pairs):
        more: TextColumn[PairFigures] = TextColumn("mean KLD more by, nats", lambda row: _figure(row.kld_difference, 6))
        sections.append([*labels, more, TextColumn("by KLD", lambda row: row.kld_verdict or "-", right=False)])
    return sections


def group_tables(
    comparison: RunComparison,
) -> Iterator[tuple[list[list[TextColumn[GroupFigures]]], list[GroupFigures]]]:
    """Sections and rows of a table for each way in which the text is divided."""
    for by in dict.fromkeys(each.group.by for each in comparison.groups):
        labels: list[TextColumn[GroupFigures]] = [
            TextColumn(by, lambda row: row.group.name, right=False),
            TextColumn("tokens", lambda row: f"{row.group.num_scored:,}"),
            TextColumn("run", lambda row: row.run.label, right=False),
        ]
        by_nll: list[TextColumn[GroupFigures]] = [TextColumn("perplexity", lambda row: _figure(row.perplexity, 4))]
        if comparison.pairs:
            name = f"over that of {comparison.base.label}"
            by_nll.append(TextColumn(name, lambda row: _figure(row.ppl_ratio, 4)))
        by_kld: list[TextColumn[GroupFigures]] = [
            TextColumn("mean KLD, nats", lambda row: _figure(row.kld, 6)),
            TextColumn("same top p, %", lambda row: _figure(row.same_top_p, 3, 100)),
        ]
        rows = [each for each in comparison.groups if each.group.by == by]
        sections = [by_nll, by_kld] if any(row.kld is not None for row in rows) else [by_nll]
        yield [[*labels, *section] for section in sections], rows


def group_notes(comparison: RunComparison) -> list[str]:
    """Why some groups have no intervals although the text has."""
    if not comparison.has_intervals or all(each.perplexity.low is not None for each in comparison.groups):
        return []
    return [f"Without an interval: groups with tokens in fewer than {MIN_UNITS} of the documents or windows drawn."]


def _merged(sections: Sequence[Sequence[TextColumn[Row]]]) -> list[TextColumn[Row]]:
    """All columns, those that several sections have only once."""
    return list({column.header: column for section in sections for column in section}.values())


def aligned(columns: Sequence[TextColumn[Row]], rows: Sequence[Row]) -> list[str]:
    """A table's lines for a terminal."""
    table = [[column.header, *(_one_line(column.cell(row)) for row in rows)] for column in columns]
    widths = [max(map(len, cells)) for cells in table]
    aligned = [
        [cell.rjust(width) if column.right else cell.ljust(width) for cell in cells]
        for column, width, cells in zip(columns, widths, table, strict=True)
    ]
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def markdown_rows(columns: Sequence[TextColumn[Row]], rows: Sequence[Row]) -> list[str]:
    """A table's lines in Markdown, none without rows."""
    if not rows:
        return []
    lines = [
        [escaped(column.header) for column in columns],
        ["---:" if column.right else "---" for column in columns],
        *([escaped(_one_line(column.cell(row))) for column in columns] for row in rows),
    ]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def escaped(text: str) -> str:
    """A label may have what Markdown takes for its own."""
    for character in "\\|`*_<[":
        text = text.replace(character, f"\\{character}")
    return text


def _number(value: float | None, digits: int) -> str:
    return _in_words(plain(value, digits))


def _figure(figure: Figure | None, digits: int, scale: float = 1) -> str:
    return _in_words(with_errors(figure, digits, scale=scale))


def _in_words(cell: Cell) -> str:
    return " ".join((cell.text, *cell.errors)).replace("∞", "inf")
