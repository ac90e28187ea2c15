"""Shows a comparison as text for a terminal and as CSV, and tables in Markdown."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain

from scoremode._texts import Column, aligned, one_line, printable
from scoremode.comparison.bootstrap import MIN_UNITS
from scoremode.comparison.figures import METRICS, EngineLog, Figure, RunComparison, RunFigures, cell_of
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.sizes import MIN_FRONT, pareto_front, points
from scoremode.comparison.summary import agreements, summary
from scoremode.runs import comparable_with

CsvRow = dict[str, object]
_CSV_HEADER = (
    "run",
    "base",
    "quantization",
    "dtype",
    "figure",
    "value",
    "stderr",
    "low",
    "high",
    "verdict",
    "path",
    "corpus",
    "corpus_sha256",
    "figures",
    "model",
    "revision",
    "versions",
    "device",
    "finished",
    "task",
    "by",
    "group",
)
_CSV_FIGURES = [name for name in RunFigures.__annotations__ if name not in ("run", "ppl_ratio")]
_RUN_SECTIONS = (
    ("gib", "bits_per_weight", "bits_per_byte"),
    ("perplexity", "ppl_ratio"),
    ("kld", "same_top_p", "kld_over_noise_floor"),
    ("kld_median", "kld_p95", "kld_p99", "kld_p999", "kld_max", "delta_p_rms"),
)
"""Metrics in the tables of runs; the last two tables are for runs with divergences."""
_ROUTE_SECTIONS = (("forced_kld", "rerouting"), ("same_experts",))
"""Metrics in the tables of runs that compare choices of experts."""
_AGREEMENT_SECTIONS = (
    ("agreement_median", "agreement_p25", "agreement_p75", "agreement_p10"),
    ("agreement_share", "agreement_ties", "agreement_floor", "agreement_floor_share"),
    ("expected_agreement",),
)
"""Metrics in the tables of runs whose reference has answers."""
_GROUP_SECTIONS = (
    ("perplexity", "ppl_ratio"),
    ("kld", "same_top_p"),
    ("agreement_median", "agreement_share", "expected_agreement"),
)
"""Metrics in the tables of groups."""
Rows = Sequence[RunFigures[RunFile | EngineLog]]


def as_text(comparison: RunComparison) -> str:
    """Show the settings, several tables, each at most 120 columns wide if labels are short, and the summary."""
    sections = chain(
        _run_sections(comparison),
        _pair_sections(comparison),
        [best_at_each_size(comparison)],
        group_tables(comparison),
    )
    return paragraphs(
        _settings(comparison),
        *map(aligned, sections),
        group_notes(comparison),
        summary(comparison),
    )


def paragraphs(*parts: Sequence[str]) -> str:
    """Join parts, each a list of lines, with an empty line between them. Empty parts are left out."""
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def as_csv(comparison: RunComparison | None, accuracies: Iterable[CsvRow] = ()) -> str:
    """Write one line per known figure, in full precision. In a line on a pair, `run` is the second run and `base` the
    first."""
    rows = [*(() if comparison is None else _csv_rows(comparison)), *accuracies]
    file = io.StringIO()
    writer = csv.DictWriter(file, _CSV_HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _as_text(cell) for name, cell in row.items()} for row in rows if row["value"] is not None)
    return file.getvalue()


def _as_text(cell: object) -> object:
    """Put an apostrophe before text that a spreadsheet would compute as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@")) else cell


def _csv_rows(comparison: RunComparison) -> Iterator[CsvRow]:
    for figures in comparison.runs:
        run = figures.run
        sizes = {"weight_bytes": run.server.weight_bytes, "num_parameters": run.server.num_parameters}
        values = {name: getattr(figures, name) for name in _CSV_FIGURES}
        for name, value in {**sizes, "bits_per_weight": run.bits_per_weight, **values}.items():
            yield _csv_row(run, name, value)
    for log in comparison.logs:
        values = {name: getattr(log, name) for name in _CSV_FIGURES}
        for name, value in {"bits_per_weight": log.run.bits_per_weight, **values}.items():
            yield {"run": log.run.label, "quantization": log.run.weights, **_csv_figure(name, value)}
    for pair in comparison.pairs:
        verdicts = {"ln_ppl_ratio": pair.verdict, "ppl_ratio": pair.verdict, "ppl_difference": None}
        for name, verdict in {**verdicts, "kld_difference": pair.kld_verdict}.items():
            row = _csv_row(pair.second, name, getattr(pair, name))
            yield {**row, "base": pair.first.label, "verdict": verdict}
    for group, figures in comparison.groups:
        for name in ("num_scored", *chain(*_GROUP_SECTIONS)):
            row = _csv_row(figures.run, name, getattr(group if name == "num_scored" else figures, name))
            base = comparison.base.label if name == "ppl_ratio" else ""
            yield {**row, "base": base, "by": group.by, "group": group.name}


def _csv_row(run: RunFile, name: str, value: Figure | float | None) -> CsvRow:
    corpus = run.corpus
    return {
        "run": run.label,
        "quantization": run.server.quantization,
        "dtype": run.server.dtype,
        **_csv_figure(name, value),
        "path": printable(run.path.name),
        "corpus": None if corpus is None else corpus.in_words,
        "corpus_sha256": None if corpus is None else corpus.sha256,
        "figures": comparable_with(corpus, run.context_length),
        "model": run.model,
        "revision": run.server.revision,
        "versions": run.versions,
        "device": run.server.devices,
        "finished": run.finished,
    }


def _csv_figure(name: str, value: Figure | float | None) -> CsvRow:
    return {"figure": name, **(asdict(value) if isinstance(value, Figure) else {"value": value})}


def _settings(comparison: RunComparison) -> list[str]:
    run, corpus = comparison.base, comparison.corpus
    return [
        f"{run.num_scored:,} scored tokens{'' if corpus is None else f' of {corpus.in_words}'}.",
        f"{run.num_windows:,} windows: {run.method}, context length {run.context_length:,}, stride {run.stride:,}; "
        f"{comparable_with(corpus, run.context_length)}.",
        f"{measured_by(comparison)}.",
        "± takes tokens as independent; [ ] is a 95 % interval that takes neighboring tokens as dependent.",
        comparison.intervals_in_words(f"Seed {comparison.seed}"),
    ]


def measured_by(comparison: RunComparison) -> str:
    """Versions, GPUs and days of the runs."""
    runs = comparison.files
    days = sorted({run.finished[:10] for run in runs if run.finished})
    span = " to ".join(sorted({*days[:1], *days[-1:]}))
    parts = [*(run.versions for run in runs), *(run.server.devices for run in runs), span]
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _cells(name: str, values: Iterable[Figure | float | None]) -> list[str]:
    """Format values of a metric, each with its errors."""
    metric = METRICS[name]
    return [cell_of(metric, value, metric.digits).in_text for value in values]


def _run_sections(comparison: RunComparison) -> list[list[Column]]:
    rows = comparison.rows
    label = Column("run", [row.run.label for row in rows], right=False)
    weights = Column("weights", [row.run.weights for row in rows], right=False)
    has_kld = any(row.kld is not None for row in rows)
    sections = _RUN_SECTIONS if has_kld else _RUN_SECTIONS[:2]
    columns = [[label, *_figures(rows, names, comparison.base.label)] for names in sections]
    columns[0].insert(1, weights)
    return [*columns, *_known_sections([label], rows, (*_ROUTE_SECTIONS, *_AGREEMENT_SECTIONS))]


def _known_sections(
    labels: Sequence[Column], rows: Rows, sections: Iterable[Sequence[str]], base: str = ""
) -> list[list[Column]]:
    """The sections of a table. Each begins with the columns `labels`, and leaves out figures that no row has."""
    used = [[name for name in names if any(row.value(name) is not None for row in rows)] for names in sections]
    return [[*labels, *_figures(rows, names, base)] for names in used if names]


def _figures(rows: Rows, names: Iterable[str], base: str) -> Iterator[Column]:
    """Yield one column per metric; figures have their errors."""
    for name in names:
        yield Column(METRICS[name].heading.format(base=base), _cells(name, [row.value(name) for row in rows]))


def agreement_as_text(comparison: RunComparison) -> list[str]:
    """Tables and sentences on answers, for a terminal; empty if the reference has no answers."""
    rows = [row for row in comparison.runs if row.agreement_share or row.expected_agreement]
    label = Column("run", [row.run.label for row in rows], right=False)
    sections = ["\n".join(aligned(section)) for section in _known_sections([label], rows, _AGREEMENT_SECTIONS)]
    return ["====== Agreement of answers ======", *sections, *agreements(comparison.runs)] if sections else []


def _pair_sections(comparison: RunComparison) -> list[list[Column]]:
    pairs = comparison.pairs
    if not pairs:
        return []
    labels = [
        Column("run", [pair.second.label for pair in pairs], right=False),
        Column("compared with", [pair.first.label for pair in pairs], right=False),
    ]
    ratios = Column("perplexity ratio", _cells("ppl_ratio", [pair.ppl_ratio for pair in pairs]))
    verdicts = Column("by perplexity", [pair.in_words(pair.verdict) for pair in pairs], right=False)
    sections = [[*labels, ratios, verdicts]]
    if any(pair.kld_difference is not None for pair in pairs):
        differences = Column("mean KLD difference, nats", _cells("kld", [pair.kld_difference for pair in pairs]))
        verdicts = Column("by KLD", [pair.in_words(pair.kld_verdict) for pair in pairs], right=False)
        sections.append([*labels, differences, verdicts])
    return sections


def best_at_each_size(comparison: RunComparison) -> list[Column]:
    """A table of the runs that no smaller run beats, by divergence if all have one, else by perplexity; empty without
    sizes."""
    name = "kld" if all(figures.kld is not None for figures in comparison.runs) else "perplexity"
    axis, drawn = points(comparison, [getattr(figures, name) for figures in comparison.runs])
    if axis is None or len(drawn) < MIN_FRONT:
        return []
    front = pareto_front(drawn)
    return [
        Column("best at each size", [point.label for point in front], right=False),
        Column(axis, [f"{point.size:.2f}" for point in front]),
        *_figures([comparison.runs[point.index] for point in front], [name], comparison.base.label),
    ]


def routes_table(comparison: RunComparison) -> list[Column]:
    """A table of the runs that compare choices of experts, with the parts of their divergences; empty without any."""
    rows = [row for row in comparison.runs if row.same_experts is not None]
    label = Column("run", [row.run.label for row in rows], right=False)
    names = chain(("kld",), *_ROUTE_SECTIONS)
    return [label, *_figures(rows, names, comparison.base.label)] if rows else []


def group_tables(comparison: RunComparison) -> Iterator[list[Column]]:
    """Yield the sections of one table per division of the text into groups."""
    for by in dict.fromkeys(group.by for group, _ in comparison.groups):
        groups, rows = zip(*(pair for pair in comparison.groups if pair[0].by == by), strict=True)
        labels = [
            Column(by, [group.name for group in groups], right=False),
            Column("tokens", [f"{group.num_scored:,}" for group in groups]),
            Column("run", [row.run.label for row in rows], right=False),
        ]
        yield from _known_sections(labels, rows, _GROUP_SECTIONS, comparison.base.label)


def group_notes(comparison: RunComparison) -> list[str]:
    """Explain why some groups have no intervals although the text has."""
    if not comparison.has_intervals or all(figures.perplexity.low is not None for _, figures in comparison.groups):
        return []
    return [f"Without an interval: groups with tokens in fewer than {MIN_UNITS} of the documents or windows drawn."]


def short_labels(labels: Sequence[str], length: int) -> list[str]:
    """Shorten labels to `length` characters, by leaving out their middle. Labels that become equal are numbered."""
    half = length // 2
    short = [label if len(label) <= length else f"{label[: half - 1]}…{label[-half:]}" for label in labels]
    counts = Counter(short)
    return [
        name if name == label or counts[name] == 1 else f"{name} ({number})"
        for number, (name, label) in enumerate(zip(short, labels, strict=True), 1)
    ]


def markdown_rows(columns: Iterable[Column]) -> list[str]:
    """Format a table in Markdown, one line per row."""
    all_cells = []
    for column in columns:
        cells = [escaped(one_line(cell)) for cell in column.cells]
        all_cells.append([escaped(column.header), "---:" if column.right else "---", *cells])
    return [f"| {' | '.join(row)} |" for row in zip(*all_cells, strict=True)]


def escaped(text: str) -> str:
    """Escape Markdown's special characters, which labels may have."""
    for character in "\\|`*_<[":
        text = text.replace(character, f"\\{character}")
    return text
