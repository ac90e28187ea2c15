"""A comparison as a Hugging Face model card: its `model-index`, the table that people publish of quantized models, and
where the figures are from."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from scoremode._texts import printable
from scoremode.comparison.figures import METRICS, Figure, RunComparison, RunFigures
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import computed_differently
from scoremode.comparison.tables import Column, escaped, markdown_rows, measured_by
from scoremode.errors import RunError
from scoremode.runs.corpora import HUB_ALIASES
from scoremode.runs.presets import comparable_with
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
_NAME_LENGTH = 24
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_START, _END = "<!-- scoremode -->", "<!-- /scoremode -->"
"""Marks of what `write_card` replaces."""
_MANY_DIGITS, _MOST_DIGITS = 4, 6
"""Decimals: above the first, an error is shown to one digit instead of two; above the second, with an exponent."""


def card(comparison: RunComparison) -> str:
    """Markdown that can be saved as README.md: YAML, the table, and provenance. What is not known is empty."""
    return f"---\n{_metadata(comparison).to_yaml()}\n---\n\n{_body(comparison)}\n"


def write_card(comparison: RunComparison, path: Path) -> None:
    """Write the card into a file between marks, or after what it has if there are none; all else stays as it is.
    RunError if a mark has no end, OSError if the file cannot be written.

    A new file has YAML too, between marks of its own. That of other people's files is left to them.
    """
    yaml, body = _marked("# ", _metadata(comparison).to_yaml()), _marked("", _body(comparison))
    if not path.exists():
        path.write_text(f"---\n{yaml}\n---\n\n{body}\n", encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    for prefix, marked in (("# ", yaml), ("", body)):
        start, end = f"{prefix}{_START}\n", f"\n{prefix}{_END}"
        before, mark, rest = f"\n{text}".partition(f"\n{start}")
        if mark:
            _, mark, after = rest.partition(end)
            if not mark:
                raise RunError(f"{path}: {_START} has no {_END} after it")
            text = f"{before}\n{marked}{after}".removeprefix("\n")
        elif not prefix:
            text = f"{text.rstrip()}\n\n{marked}\n"
    path.write_text(text, encoding="utf-8")


def _marked(prefix: str, content: str) -> str:
    return f"{prefix}{_START}\n{content}\n{prefix}{_END}"


def _body(comparison: RunComparison) -> str:
    table = "\n".join(markdown_rows(_columns(comparison)))
    warnings = [escaped(printable(each)) for each in computed_differently(comparison.files)]
    return "\n\n".join([table, _provenance(comparison), *warnings])


def _columns(comparison: RunComparison) -> list[Column]:
    """The columns of the table, without those of speed and of answers where no run knows its own."""
    rows, pairs = comparison.runs, comparison.base_pairs
    speeds = [_plain("tokens_per_second", row.run.tokens_per_second, 0) for row in rows]
    columns = [
        Column("quant", [_name(row.run.label) for row in rows], right=False),
        Column("GiB", [_plain("gib", row.run.gib) for row in rows]),
        Column("bits per weight", [_plain("bits_per_weight", row.run.bits_per_weight) for row in rows]),
        Column("PPL ±", [_with_error("perplexity", row.perplexity) for row in rows]),
        Column("ΔPPL % ±", [_with_error("ppl_change", row.ppl_change, "+") for row in rows]),
        Column("mean KLD ±", ["0" if row.has_no_divergence else _with_error("kld", row.kld) for row in rows]),
        *(
            Column(heading, ["0" if row.has_no_divergence else _number(getattr(row, name), None) for row in rows])
            for name, heading in _QUANTILES.items()
        ),
        Column("RMS Δp %", [_plain("delta_p_rms", row.delta_p_rms) for row in rows]),
        Column("same top %", [_plain("same_top_p", row.same_top_p) for row in rows]),
        Column(_SAME_FOR, [_plain("agreement_median", row.agreement_median, 0) for row in rows]),
        Column("tokens/s", speeds),
        Column("verdict", ["", *(pairs[row.run.label].verdict for row in rows[1:])], right=False),
    ]
    return [column for column in columns if any(column.cells) or column.header not in (_SAME_FOR, "tokens/s")]


def _name(label: str) -> str:
    """The label, or of a long one the beginning and the end, where quantizations differ."""
    name = label = " ".join(label.split())
    for length in range(min(_NAME_LENGTH, len(label)), 1, -1):
        if len(escaped(name)) <= _NAME_LENGTH:
            break
        num_last = length * 3 // 5
        name = f"{label[: length - 1 - num_last]}…{label[-num_last:]}"
    return name


def _plain(name: str, value: Figure | float | None, digits: int = 2) -> str:
    number = value.value if isinstance(value, Figure) else value
    if number is not None and math.isinf(number):
        return "∞"
    return "" if number is None else f"{METRICS[name].scale * number:,.{digits}f}"


def _with_error(name: str, figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    scale = METRICS[name].scale
    return _number(scale * figure.value, None if figure.stderr is None else scale * figure.stderr, sign)


def _number(value: float | None, stderr: float | None, sign: str = "") -> str:
    """A number whose error has two digits, or one where that would be long; without an error it has three."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    if stderr is None or not math.isfinite(stderr) or not stderr:
        return f"{value:{sign},.2f}" if abs(value) >= 10 else f"{value:{sign}#.3g}"
    digits = max(0, 1 - math.floor(math.log10(stderr)))
    if digits > _MANY_DIGITS:
        digits -= 1
    if digits > _MOST_DIGITS:
        return f"{value:{sign}.1e} ± {stderr:.0e}"
    return f"{value:{sign},.{digits}f} ± {stderr:,.{digits}f}"


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
