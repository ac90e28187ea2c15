"""A comparison as a Hugging Face model card: its `model-index`, the table that people publish of quantized models, and
where the figures are from."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from scoremode._texts import printable
from scoremode.comparison.figures import METRICS, NOT_KNOWN, Figure, RunComparison, RunFigures, plain, with_errors
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import computed_differently
from scoremode.comparison.tables import Column, escaped, markdown_rows, measured_by, short_labels
from scoremode.runs import HUB_ALIASES, comparable_with, read_card, with_card, write_whole
from scoremode.windows import STRIDED_METHODS

_HUB_METRICS = {
    "perplexity": ("perplexity", "perplexity"),
    "ppl_change": ("perplexity_change", "change of perplexity, %"),
    "kld": ("kl_divergence", "mean KL divergence, nats"),
    "kld_p999": ("kl_divergence_p999", "99.9 % KL divergence, nats"),
    "delta_p_rms": ("rms_delta_p", "RMS Δp, %"),
    "same_top_p": ("same_top", "same top token, %"),
}
"""The types and names that metrics have on the hub."""
_QUANTILES = {"kld_median": "median KLD", "kld_p99": "99 % KLD", "kld_p999": "99.9 % KLD"}
_SAME_FOR = "same for (median tokens)"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def card(comparison: RunComparison) -> str:
    """Markdown that can be saved as README.md: YAML, the table, and provenance. What is not known is empty."""
    return f"---\n{_metadata(comparison).to_yaml()}\n---\n\n{_body(comparison)}\n"


def write_card(comparison: RunComparison, path: Path) -> None:
    """Write the card into a file between marks, or after what it has if there are none; all else stays as it is.
    RunError if the file cannot be used, OutputError if it cannot be written: then it stays as it is.

    A new file has YAML too, between marks of its own. That of other people's files is left to them.
    """
    text = with_card(path, read_card(path), _metadata(comparison).to_yaml(), _body(comparison))
    write_whole(path, text.encode())


def _body(comparison: RunComparison) -> str:
    table = "\n".join(markdown_rows(_columns(comparison)))
    warnings = [escaped(printable(each)) for each in computed_differently(comparison.files)]
    return "\n\n".join([table, _provenance(comparison), *warnings])


def _columns(comparison: RunComparison) -> list[Column]:
    """The columns of the table, without those of speed and of answers where no run knows its own."""
    rows, pairs = comparison.runs, comparison.base_pairs
    labels = short_labels([row.run.label for row in rows], 24)
    columns = [
        Column("quant", labels, right=False),
        Column("GiB", _cells(rows, "gib", 2)),
        Column("bits per weight", _cells(rows, "bits_per_weight", 2)),
        Column("PPL ±", _cells(rows, "perplexity")),
        Column("ΔPPL % ±", _cells(rows, "ppl_change", sign="+")),
        Column("mean KLD ±", _cells(rows, "kld")),
        *(Column(heading, _cells(rows, name)) for name, heading in _QUANTILES.items()),
        Column("RMS Δp %", _cells(rows, "delta_p_rms", 2)),
        Column("same top %", _cells(rows, "same_top_p", 2)),
        Column(_SAME_FOR, _cells(rows, "agreement_median", 0)),
        Column("tokens/s", _cells(rows, "tokens_per_second", 0)),
        Column("verdict", ["", *(pairs[row.run.label].verdict for row in rows[1:])], right=False),
    ]
    return [column for column in columns if any(column.cells) or column.header not in (_SAME_FOR, "tokens/s")]


def _cells(rows: Sequence[RunFigures], name: str, digits: int | None = None, sign: str = "") -> list[str]:
    """A figure of each run: to so many digits after the point, or with its error and the digits that this leaves. It is
    empty where it is not known."""
    metric = METRICS[name]
    texts = []
    for row in rows:
        value = row.value(name)
        is_figure = isinstance(value, Figure)
        cell = with_errors(value, digits, scale=metric.scale, sign=sign) if is_figure else plain(value, digits)
        error = cell.errors[:1] if is_figure and digits is None and value.stderr is not None else ()
        texts.append("" if cell.text == NOT_KNOWN else " ".join((cell.text, *error)))
    return texts


def _provenance(comparison: RunComparison) -> str:
    """Where the figures are from, in one line."""
    base, runs, revision = comparison.base, comparison.files, comparison.base.server.revision
    model = base.model + (f"@{revision[:8]}" if revision else "")
    parts = [
        f"Base {base.label}" if base.label == model else f"Base {base.label} ({model})",
        *(f"{run.label}: {run.weights}" for run in runs),
        base.text_in_words if comparison.corpus is None else comparison.corpus.in_words,
        f"{base.method}, context length {base.context_length:,}",
        f"stride {base.stride:,}" if base.method in STRIDED_METHODS else "",
        f"{base.num_scored:,} tokens",
        comparable_with(comparison.corpus, base.context_length),
        measured_by(comparison),
        "± one standard error, tokens taken as independent",
    ]
    command = comparison.command("--card")
    code = escaped(command) if "`" in command else f"`{command}`"
    return f"{escaped(printable('; '.join(filter(None, parts))))}; {code}"


def _metadata(comparison: RunComparison) -> ModelCardData:
    """Build what huggingface.co reads from the head of a model card: the base if it is on the hub, and the figures of
    one model, that of the first run that is not of the base, in all of its lanes."""
    base = comparison.base
    shown = [each for each in comparison.runs[1:] if not _is_in_other_lane(each.run, base)]
    first = (shown or comparison.runs)[0]
    lanes = [first, *(each for each in shown if _is_in_other_lane(each.run, first.run))]
    is_on_hub = _HUB_NAME.fullmatch(base.model) is not None
    return ModelCardData(
        base_model=base.model if is_on_hub else None,
        model_name=first.run.label,
        eval_results=[result for each in lanes for result in _results(comparison, each)],
        base_model_relation="quantized" if is_on_hub else None,
    )


def _is_in_other_lane(one: RunFile, other: RunFile) -> bool:
    """Whether two runs are of one model in two lanes."""
    return one.lane != other.lane and one.server.fingerprint == other.server.fingerprint is not None


def _results(comparison: RunComparison, figures: RunFigures) -> Iterator[EvalResult]:
    """List the figures of a run. What else decides them is in the config and split of the dataset, by which the hub
    tells results apart."""
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
                dataset_split=", ".join(filter(None, (split, f"{run.num_windows} windows", f"{run.lane} lane"))),
                metric_type=type_,
                metric_name=hub_name,
                metric_value=float(f"{METRICS[metric].scale * value:.6g}"),
            )
