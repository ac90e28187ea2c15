"""A comparison as a Hugging Face model card: its `model-index`, the table that people publish of quantized models, and
where the figures are from."""

import math
import os
import re

from huggingface_hub import EvalResult, ModelCardData

from scoremode._texts import printable
from scoremode.comparison.figures import METRICS, Figure, RunComparison, RunFigures
from scoremode.comparison.run_file import RunFile, compare_command, model_name
from scoremode.comparison.summary import computed_differently
from scoremode.comparison.tables import escaped, measured_by
from scoremode.runs.corpora import HUB_ALIASES
from scoremode.runs.presets import comparable_with
from scoremode.runs.report import weights_in_words
from scoremode.windows import STRIDED_METHODS

_HEADER = ("quant", "GiB", "bits per weight", "PPL ±", "ΔPPL % ±", "mean KLD ±", "99.9 % KLD", "RMS Δp %", "same top %")
_HUB_METRICS = {
    "perplexity": ("perplexity", "perplexity"),
    "ppl_change": ("perplexity_change", "change of perplexity, %"),
    "kld": ("kl_divergence", "mean KL divergence, nats"),
    "kld_p999": ("kl_divergence_p999", "99.9 % KL divergence, nats"),
    "delta_p_rms": ("rms_delta_p", "RMS Δp, %"),
    "same_top_p": ("same_top", "same top token, %"),
}
"""The types and names that metrics have on the hub."""
_NAME_LENGTH = 24
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_MANY_DIGITS, _MOST_DIGITS = 4, 6
"""Decimals: above the first, an error is shown to one digit instead of two; above the second, with an exponent."""


def card(comparison: RunComparison) -> str:
    """Markdown that can be saved as README.md: YAML, the table, and a line of provenance. What is not known is empty.

    Changes of perplexity are those from the reference where the first run is of another model than the reference, and
    from the first run otherwise.
    """
    rows: list[tuple[str, ...]] = [_HEADER, ("---", *["---:"] * (len(_HEADER) - 1))]
    if (base := comparison.base_reference) is not None:
        perplexity = _number(base.perplexity, base.perplexity_stderr)
        rows.append((_name(base.name), "", "", perplexity, *[""] * (len(_HEADER) - 4)))
    rows += [_row(comparison, figures) for figures in comparison.runs]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    warnings = [escaped(printable(each)) for each in computed_differently([each.run for each in comparison.runs])]
    return (
        f"---\n{_metadata(comparison).to_yaml()}\n---\n\n"
        + "\n\n".join([table, _provenance(comparison), *warnings])
        + "\n"
    )


def _row(comparison: RunComparison, figures: RunFigures) -> tuple[str, ...]:
    run = figures.run
    is_same = figures.has_no_divergence
    return (
        _name(run.label),
        _plain("gib", run.gib),
        _plain("bits_per_weight", run.bits_per_weight),
        _with_error("perplexity", figures.perplexity),
        _with_error("ppl_change", comparison.ppl_change(run), "+"),
        "0" if is_same else _with_error("kld", figures.kld),
        "0" if is_same else _number(figures.kld_p999, None),
        _plain("delta_p_rms", figures.delta_p_rms),
        _plain("same_top_p", figures.same_top_p),
    )


def _name(label: str) -> str:
    """The label, or of a long one the beginning and the end, where quantizations differ."""
    label = " ".join(label.split())
    name = escaped(label)
    for length in range(min(_NAME_LENGTH, len(label)), 1, -1):
        if len(name) <= _NAME_LENGTH:
            break
        num_last = length * 3 // 5
        name = escaped(f"{label[: length - 1 - num_last]}…{label[-num_last:]}")
    return name


def _plain(name: str, value: Figure | float | None) -> str:
    number = value.value if isinstance(value, Figure) else value
    return "" if number is None else f"{METRICS[name].scale * number:.2f}"


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
        return f"{value:{sign}.2f}" if abs(value) >= 10 else f"{value:{sign}#.3g}"
    digits = max(0, 1 - math.floor(math.log10(stderr)))
    if digits > _MANY_DIGITS:
        digits -= 1
    if digits > _MOST_DIGITS:
        return f"{value:{sign}.1e} ± {stderr:.0e}"
    return f"{value:{sign}.{digits}f} ± {stderr:.{digits}f}"


def _provenance(comparison: RunComparison) -> str:
    """Where the figures are from, in one line."""
    base, reference, runs = comparison.base, comparison.base_reference, [each.run for each in comparison.runs]
    label, model = (base.label, base.model) if reference is None else (reference.name, reference.model)
    revision = (reference or base.server).revision
    model = model_name(model) + (f"@{revision[:8]}" if revision else "")
    parts = [
        f"Base {label}" if label == model else f"Base {label} ({model})",
        "" if reference is None else f"{reference.name}: {weights_in_words(reference)}",
        *(f"{run.label}: {run.weights}" for run in runs),
        f"text {base.text_identity[:12]}" if comparison.corpus is None else comparison.corpus.in_words,
        f"{base.method}, context length {base.context_length:,}",
        f"stride {base.stride:,}" if base.method in STRIDED_METHODS else "",
        f"{base.num_scored:,} tokens",
        comparable_with(comparison.corpus, base.context_length),
        measured_by(comparison),
        "± one standard error, tokens taken as independent",
    ]
    paths = [os.path.relpath(run.path) for run in runs]
    names = [run.path.name if path.startswith(os.pardir) else path for run, path in zip(runs, paths, strict=True)]
    # What prints the card again where the runs are.
    command = compare_command(runs, names, "--card")
    code = escaped(command) if "`" in command else f"`{command}`"
    return f"{escaped(printable('; '.join(filter(None, parts))))}; {code}"


def _metadata(comparison: RunComparison) -> ModelCardData:
    """Build what huggingface.co reads from the head of a model card: the base if it is on the hub, and the figures of
    one model, that of the first run that is not of the base, in all of its lanes."""
    base, is_base = comparison.base, comparison.base_reference is None and len(comparison.runs) > 1
    shown = [
        each for each in comparison.runs if not (is_base and (each.run is base or _is_in_other_lane(each.run, base)))
    ]
    first = (shown or comparison.runs)[0]
    lanes = [first, *(each for each in shown if _is_in_other_lane(each.run, first.run))]
    name = (comparison.base_reference or base).model
    is_on_hub = _HUB_NAME.fullmatch(name) is not None
    return ModelCardData(
        base_model=name if is_on_hub else None,
        model_name=first.run.label,
        eval_results=[result for each in lanes for result in _results(comparison, each)],
        base_model_relation="quantized" if is_on_hub else None,
    )


def _is_in_other_lane(one: RunFile, other: RunFile) -> bool:
    """Whether two runs are of one model in two lanes."""
    return one.lane != other.lane and one.server.fingerprint == other.server.fingerprint is not None


def _results(comparison: RunComparison, figures: RunFigures) -> list[EvalResult]:
    """List the figures of a run. What else decides them is in the config and split of the dataset, by which the hub
    tells results apart."""
    run, corpus = figures.run, comparison.corpus
    name = f"text {run.text_identity[:12]}" if corpus is None else corpus.name
    config, split = (None, None) if corpus is None else (corpus.config, corpus.split)
    stride = f"stride {run.stride}" if run.method in STRIDED_METHODS else None
    windows = (config, run.method, f"context length {run.context_length}", stride)
    results = []
    for metric, (type_, hub_name) in _HUB_METRICS.items():
        figure = comparison.ppl_change(run) if metric == "ppl_change" else getattr(figures, metric)
        value = figure.value if isinstance(figure, Figure) else figure
        if value is not None and math.isfinite(value):
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type="text" if corpus is None else HUB_ALIASES.get(name, (name,))[0],
                    dataset_name=name,
                    dataset_config=", ".join(filter(None, windows)),
                    dataset_split=", ".join(filter(None, (split, f"{run.num_windows} windows", f"{run.lane} lane"))),
                    metric_type=type_,
                    metric_name=hub_name,
                    metric_value=float(f"{METRICS[metric].scale * value:.6g}"),
                )
            )
    return results
