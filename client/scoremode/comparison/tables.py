"""A comparison as text for a terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from scoremode.comparison.compare import ppl_change
from scoremode.comparison.figures import Comparison, Figure, PairFigures, RunFigures
from scoremode.comparison.report_tables import Cell, floors, plain, with_errors
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import summary
from scoremode.runs.presets import comparable_with
from scoremode.runs.report import weights_in_words

Row = TypeVar("Row")

_CSV_HEADER = ("run", "beside", "quantization", "dtype", "figure", "value", "stderr", "low", "high", "verdict")
_CSV_OF_RUN = ("path", "corpus", "corpus_sha256", "figures", "model", "revision", "versions", "device", "finished")


def as_text(comparison: Comparison) -> str:
    """Several tables, so that each fits in 120 columns where labels are short, and the summary."""
    parts = [
        _settings(comparison),
        *(aligned(section, comparison.runs) for section in _run_sections(comparison)),
        *(aligned(section, comparison.pairs) for section in _pair_sections(comparison)),
        summary(comparison),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """A table of runs, one of pairs, and the summary, as GitHub shows them."""
    parts = [
        markdown_rows(_merged(_run_sections(comparison)), comparison.runs),
        markdown_rows(_merged(_pair_sections(comparison)), comparison.pairs),
        [f"- {escaped(sentence)}" for sentence in summary(comparison)],
        [f"{escaped(' '.join(_settings(comparison)))}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def as_csv(comparison: Comparison | None, accuracies: Iterable[Sequence[object]] = ()) -> str:
    """One line per figure, in full precision. A pair's `run` is the second, `beside` the first.

    Args:
        comparison: Of runs, if there are any.
        accuracies: Run, `beside`, task, figure, value, ends of its interval, and verdict.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_CSV_HEADER, *_CSV_OF_RUN, "task"])
    if comparison is not None:
        writer.writerows(_csv_rows(comparison))
    for run, beside, task, figure, value, low, high, verdict in accuracies:
        row = [run, beside, "", "", figure, value, None, low, high, verdict]
        writer.writerow([*row, *[None] * len(_CSV_OF_RUN), task])
    return file.getvalue()


def _csv_rows(comparison: Comparison) -> Iterator[list[object]]:
    for figures in comparison.runs:
        for name, value in _run_values(figures).items():
            if value is not None:
                row = [figures.run.label, "", *_weights(figures.run), name, *_values(value), ""]
                yield [*row, *_of_run(figures.run), None]
    for pair in comparison.pairs:
        for name, figure, verdict in _pair_values(pair):
            if figure is not None:
                row = [pair.second.label, pair.first.label, *_weights(pair.second), name]
                yield [*row, *_values(figure), verdict, *_of_run(pair.second), None]


@dataclass(frozen=True, slots=True)
class TextColumn(Generic[Row]):
    """A column of a table, in text or in Markdown."""

    header: str
    cell: Callable[[Row], str]
    right: bool = True
    """Whether it is set flush right."""


def _settings(comparison: Comparison) -> list[str]:
    run, corpus = comparison.base, comparison.corpus
    return [
        f"{run.num_scored:,} tokens{'' if corpus is None else f' of {corpus.in_words}'}.",
        f"{run.num_windows:,} windows: {run.method}, context length {run.context_length:,}, stride {run.stride:,}; "
        f"{comparable_with(corpus, run.context_length)}.",
        f"{measured_by(comparison)}.",
        "± takes tokens as independent. [95 % interval] does not:",
        f"{comparison.num_resamples:,} resamples, {comparison.blocks}, seed {comparison.seed}.",
    ]


def measured_by(comparison: Comparison) -> str:
    """Versions, GPUs and days of the runs."""
    runs = [figures.run for figures in comparison.runs]
    days = sorted({run.finished[:10] for run in runs if run.finished})
    span = " to ".join(sorted({*days[:1], *days[-1:]}))
    parts = [*(run.versions for run in runs), *(run.server.devices for run in runs), span]
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _run_sections(comparison: Comparison) -> list[list[TextColumn[RunFigures]]]:
    base = comparison.base.label
    ratios = {pair.second.label: pair.ppl_ratio for pair in comparison.pairs_with_base}
    change = ppl_change(comparison, comparison.base)
    if not comparison.pairs and change is not None and comparison.base_reference is not None:
        base, ratios = (
            f"the reference {comparison.base_reference.name}",
            {base: replace(change, value=1 + change.value)},
        )
    label: TextColumn[RunFigures] = TextColumn("run", lambda row: row.run.label, right=False)
    weights: list[TextColumn[RunFigures]] = [
        TextColumn("weights", lambda row: weights_in_words(row.run.server), right=False),
        TextColumn("GiB", lambda row: _number(row.run.gib, 3)),
        TextColumn("bits per weight", lambda row: _number(row.run.bits_per_weight, 2)),
        TextColumn("bits per byte", lambda row: _figure(row.bits_per_byte, 4)),
    ]
    perplexity: list[TextColumn[RunFigures]] = [
        TextColumn("perplexity", lambda row: _figure(row.perplexity, 4)),
        TextColumn(f"over that of {base}", lambda row: _figure(ratios.get(row.run.label), 4)),
    ]
    kld: list[TextColumn[RunFigures]] = [
        TextColumn("mean KLD, nats", lambda row: _figure(row.kld, 6)),
        TextColumn("same top p, %", lambda row: _figure(row.same_top_p, 3, 100)),
        TextColumn("times the floor", lambda row: floors(row.kld_over_noise_floor).text),
    ]
    tail: list[TextColumn[RunFigures]] = [
        TextColumn("median KLD", lambda row: _number(row.kld_median, 6)),
        TextColumn("95 %", lambda row: _number(row.kld_p95, 4)),
        TextColumn("99 %", lambda row: _number(row.kld_p99, 4)),
        TextColumn("99.9 %", lambda row: _number(row.kld_p999, 4)),
        TextColumn("max KLD", lambda row: _number(row.kld_max, 4)),
        TextColumn("RMS Δp, %", lambda row: _figure(row.delta_p_rms, 3, 100)),
    ]
    has_kld = any(figures.kld is not None for figures in comparison.runs)
    return [[label, *weights], [label, *perplexity], *([[label, *kld], [label, *tail]] if has_kld else [])]


def _pair_sections(comparison: Comparison) -> list[list[TextColumn[PairFigures]]]:
    if not comparison.pairs:
        return []
    labels: list[TextColumn[PairFigures]] = [
        TextColumn("run", lambda row: row.second.label, right=False),
        TextColumn("compared with", lambda row: row.first.label, right=False),
    ]
    perplexity: list[TextColumn[PairFigures]] = [
        TextColumn("perplexity ratio", lambda row: _figure(row.ppl_ratio, 4)),
        TextColumn("by perplexity", lambda row: row.verdict, right=False),
    ]
    kld: list[TextColumn[PairFigures]] = [
        TextColumn("mean KLD more by, nats", lambda row: _figure(row.kld_difference, 6)),
        TextColumn("by KLD", lambda row: row.kld_verdict or "-", right=False),
    ]
    has_kld = any(pair.kld_difference is not None for pair in comparison.pairs)
    return [[*labels, *perplexity], *([[*labels, *kld]] if has_kld else [])]


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


def _weights(run: RunFile) -> tuple[str, str]:
    return run.server.quantization or "", run.server.dtype


def _of_run(run: RunFile) -> list[str | None]:
    corpus = run.corpus
    return [
        str(run.path),
        None if corpus is None else corpus.in_words,
        None if corpus is None else corpus.sha256,
        comparable_with(corpus, run.context_length),
        run.model,
        run.server.revision,
        run.versions,
        run.server.devices,
        run.finished,
    ]


def _number(value: float | None, digits: int) -> str:
    return _in_words(plain(value, digits))


def _figure(figure: Figure | None, digits: int, scale: float = 1) -> str:
    return _in_words(with_errors(figure, digits, scale=scale))


def _in_words(cell: Cell) -> str:
    return " ".join((cell.text, *cell.errors)).replace("∞", "inf")


def _run_values(figures: RunFigures) -> dict[str, Figure | float | None]:
    return {
        "weight_bytes": figures.run.server.weight_bytes,
        "num_parameters": figures.run.server.num_parameters,
        "bits_per_weight": figures.run.bits_per_weight,
        **{field.name: getattr(figures, field.name) for field in fields(figures) if field.name != "run"},
    }


def _pair_values(pair: PairFigures) -> list[tuple[str, Figure | None, str]]:
    return [
        ("ln_ppl_ratio", pair.ln_ppl_ratio, pair.verdict),
        ("ppl_ratio", pair.ppl_ratio, pair.verdict),
        ("ppl_difference", pair.ppl_difference, ""),
        ("kld_difference", pair.kld_difference, pair.kld_verdict or ""),
    ]


def _values(value: Figure | float) -> list[float | None]:
    return (
        [value.value, value.stderr, value.low, value.high] if isinstance(value, Figure) else [value, None, None, None]
    )
