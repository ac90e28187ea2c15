"""Makes a Hugging Face model card from a comparison: `model-index`, the table that is usual for quantized models, one
plot, and how the figures were measured."""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCardData

from scoremode._texts import Column, printable
from scoremode.comparison.figures import (
    METRICS,
    NOT_KNOWN,
    Figure,
    RunComparison,
    RunFigures,
    cell_of,
    decimals,
    with_interval,
)
from scoremode.comparison.model_index import LANE, with_model_index
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import computed_differently
from scoremode.comparison.tables import escaped, markdown_rows, measured_by, short_labels
from scoremode.runs import HUB_ALIASES, comparable_with, front_matter, newline_of, read_card, with_block, write_whole
from scoremode.windows import STRIDED_METHODS

_log = logging.getLogger(__name__)

_HUB_METRICS = {
    "perplexity": ("perplexity", "perplexity"),
    "ppl_change": ("perplexity_change", "change of perplexity, %"),
    "kld": ("kl_divergence", "mean KL divergence, nats"),
    "kld_p999": ("kl_divergence_p999", "99.9 % KL divergence, nats"),
    "delta_p_rms": ("rms_delta_p", "RMS Δp, %"),
    "same_top_p": ("same_top", "same top token, %"),
}
"""The hub's type and name for each metric."""
_COLUMNS: dict[str, tuple[str, int | None, str]] = {
    "gib": ("GiB", 2, "size of the weight files"),
    "bits_per_weight": ("bits per weight", 2, ""),
    "perplexity": ("PPL ±", None, "perplexity"),
    "ppl_change": ("ΔPPL % [ ]", None, "change of perplexity with its 95 % interval"),
    "kld": ("mean KLD ±", None, "mean KL divergence in nats ± one standard error"),
    "kld_median": ("median KLD", None, ""),
    "kld_p99": ("99 % KLD", None, ""),
    "kld_p999": ("99.9 % KLD", None, "KL divergence that one token in 1,000 exceeds"),
    "delta_p_rms": ("RMS Δp %", 2, "root mean square of the change of the text's probabilities"),
    "same_top_p": ("same top %", 2, "share of tokens whose most likely token is the same"),
    "same_experts": ("same experts %", 2, "share of tokens and layers that choose the same experts"),
    "agreement_median": ("same answer for (tokens)", 0, "median number of tokens for which answers are the same"),
}
"""Each column's heading, digits after the point (None: as many as are significant, given the error), and meaning."""
_SHORT = ("gib", "ppl_change", "kld", "kld_p999", "same_top_p", "same_experts", "agreement_median")
_OF_A_MODEL = ("gib", "bits_per_weight", "perplexity")
"""Columns that describe a model itself, not its difference from the base."""
_DEFINITIONS = "https://github.com/ggml-org/llama.cpp/blob/master/tools/perplexity/README.md"
_INTERVALS = "https://arch.readthedocs.io/en/stable/bootstrap/timeseries-bootstraps.html"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def card(comparison: RunComparison, *, is_full: bool = False) -> str:
    """Make Markdown for a README.md: YAML, a table of six figures, or of all if `is_full`, and how it was measured."""
    return f"---\n{_metadata(comparison).to_yaml()}\n---\n\n{_body(comparison, is_full)}\n"


def write_card(comparison: RunComparison, path: Path, *, is_full: bool = False) -> None:
    """Write the card into a file: its text between the card's marks, or at the end if there are no marks, and its
    figures into `model-index` in the front matter. All other text stays unchanged. The plot becomes a file next to it.
    If the front matter is missing or cannot be edited safely, the log has the YAML to paste.

    RunError if the file cannot be used, OutputError if it cannot be written; the file then stays unchanged.
    """
    text, metadata = read_card(path), _metadata(comparison)
    if not text.strip():
        text = f"---\n{metadata.to_yaml()}\n---\n"
    else:
        head = front_matter(text)
        merged = None if head is None else with_model_index(text[head], metadata, newline_of(text))
        if head is not None and merged is not None:
            text = text[: head.start] + merged + text[head.stop :]
        else:
            index = ModelCardData(model_name=metadata.model_name, eval_results=metadata.eval_results).to_yaml()
            reason = "no front matter" if head is None else "front matter that is not clear"
            _log.warning("%s has %s. To show the figures on the hub, paste into it:\n\n%s\n", path, reason, index)
    body = _body(comparison, is_full, _write_plot(comparison, path))
    write_whole(path, with_block(path, text, body).encode())


def _write_plot(comparison: RunComparison, card_path: Path) -> str:
    """Write the plot next to the card, and return the Markdown that shows it; empty without KL divergences."""
    # Imported here because this takes a second, and a printed card does not need it.
    from scoremode.comparison.plot_style import as_adaptive_svg
    from scoremode.comparison.plots import plots

    for plot in plots(comparison):
        if plot.name == "kl-divergence":
            path = card_path.with_name(f"{card_path.stem}-{plot.name}.svg")
            write_whole(path, as_adaptive_svg(plot.draw).encode())
            return f"![{escaped(plot.subject)}]({quote(path.name)})"
    return ""


def _body(comparison: RunComparison, is_full: bool, plot: str = "") -> str:
    columns = _columns(comparison, tuple(_COLUMNS) if is_full else _SHORT)
    base, corpus = comparison.base, comparison.corpus
    text = base.text_in_words if corpus is None else corpus.name
    meanings = [meaning for heading, _, meaning in _COLUMNS.values() if meaning and heading in columns]
    sentence = (
        f"Compared with {escaped(base.label)} over {base.num_scored:,} tokens of {escaped(printable(text))}: the "
        f"{', the '.join(meanings)} ([definitions]({_DEFINITIONS}), [intervals]({_INTERVALS}))."
    )
    warnings = [escaped(printable(warning)) for warning in computed_differently(comparison.files)]
    table = "\n".join(markdown_rows(columns.values()))
    tasks = ""
    if comparison.tasks is not None:
        # Imported here because this takes a second.
        from scoremode.comparison.accuracy_tables import tasks_as_text

        tasks = tasks_as_text(comparison.tasks, is_markdown=True).strip()
    return "\n\n".join(filter(None, (sentence, table, plot, tasks, *warnings, _provenance(comparison))))


def _columns(comparison: RunComparison, names: Sequence[str]) -> dict[str, Column]:
    """The columns of the table by their headings, without columns that are empty for all runs."""
    rows = comparison.runs
    columns = {"quant": Column("quant", short_labels([row.run.label for row in rows], 24), right=False)}
    for name in names:
        heading, digits, _ = _COLUMNS[name]
        cells = [_cell(row, name, digits) for row in rows]
        if comparison.base.is_of_original and name not in _OF_A_MODEL:
            # Show no differences of the original from itself, although rounding may give its run some.
            cells[0] = NOT_KNOWN
        if any(cell != NOT_KNOWN for cell in cells):
            columns[heading] = Column(heading, cells)
    return columns


def _cell(row: RunFigures, name: str, digits: int | None) -> str:
    """Format a figure with `digits` after the point. If `digits` is None, show its standard error too, and as many
    digits as are significant given this error."""
    value = row.value(name)
    if name == "ppl_change" and value is not None:
        return with_interval(value, scale=100, sign="+").in_text
    has_error = digits is None and isinstance(value, Figure) and value.stderr is not None
    cell = cell_of(METRICS[name], value, decimals(value.stderr, 1) if has_error else digits)
    return " ".join((cell.text, *(cell.errors[:1] if has_error else ())))


def _provenance(comparison: RunComparison) -> str:
    """Describe how the figures were measured, in a list that readers can open."""
    base, corpus, revision = comparison.base, comparison.corpus, comparison.base.server.revision
    model = base.model + (f"@{revision[:8]}" if revision else "")
    stride = f", stride {base.stride:,}" if base.method in STRIDED_METHODS else ""
    items = [
        f"Base: {base.label}" if base.label == model else f"Base: {base.label} ({model})",
        *(f"{run.label}: {run.weights}" for run in comparison.files),
        f"Text: {base.text_in_words if corpus is None else corpus.in_words}",
        f"Windows: {base.method}, context length {base.context_length:,}{stride}; {base.num_scored:,} tokens",
        *(f"Answers: {answers}" for answers in [comparison.answers_in_words] if answers),
        f"Figures: {comparable_with(corpus, base.context_length)}",
        f"Measured by: {measured_by(comparison)}",
        "±: one standard error, tokens taken as independent",
        comparison.intervals_in_words("[ ]"),
    ]
    command = comparison.command("--card")
    code = escaped(command) if "`" in command else f"`{command}`"
    lines = [*(escaped(printable(item)) for item in items), code]
    listed = "\n".join(f"- {line}" for line in lines)
    return f"<details>\n<summary>How this was measured</summary>\n\n{listed}\n\n</details>"


def _metadata(comparison: RunComparison) -> ModelCardData:
    """Build the metadata that huggingface.co reads from a model card: the base if it is on the hub, and the figures of
    one model in all of its lanes. The model is that of the first run with another model than the base, or the base."""
    base = comparison.base
    shown = [figures for figures in comparison.runs[1:] if not _is_in_other_lane(figures.run, base)]
    first = (shown or comparison.runs)[0]
    lanes = [first, *(figures for figures in shown if _is_in_other_lane(figures.run, first.run))]
    is_on_hub = _HUB_NAME.fullmatch(base.model) is not None
    return ModelCardData(
        base_model=base.model if is_on_hub else None,
        model_name=first.run.label,
        eval_results=[result for figures in lanes for result in _results(comparison, figures)],
        base_model_relation="quantized" if is_on_hub else None,
    )


def _is_in_other_lane(one: RunFile, other: RunFile) -> bool:
    """Whether two runs measured the same model in different lanes."""
    return one.lane != other.lane and one.server.fingerprint == other.server.fingerprint is not None


def _results(comparison: RunComparison, figures: RunFigures) -> Iterator[EvalResult]:
    """Yield the figures of a run. The dataset's config and split include the run's settings, because the hub tells
    results apart by config and split."""
    run, corpus = figures.run, comparison.corpus
    name = run.text_in_words if corpus is None else corpus.name
    config, split = (None, None) if corpus is None else (corpus.config, corpus.split)
    stride = f"stride {run.stride}" if run.method in STRIDED_METHODS else None
    windows = (config, run.method, f"context length {run.context_length}", stride)
    for metric, (type_, hub_name) in _HUB_METRICS.items():
        figure = getattr(figures, metric)
        value = figure.value if isinstance(figure, Figure) else figure
        if value is not None and math.isfinite(value):
            yield EvalResult(
                task_type="text-generation",
                dataset_type="text" if corpus is None else HUB_ALIASES.get(name, (name,))[0],
                dataset_name=name,
                dataset_config=", ".join(filter(None, windows)),
                dataset_split=", ".join(filter(None, (split, f"{run.num_windows} windows", f"{run.lane}{LANE}"))),
                metric_type=type_,
                metric_name=hub_name,
                metric_value=float(f"{METRICS[metric].scale * value:.6g}"),
            )
