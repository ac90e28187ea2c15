"""Summarizes a comparison in sentences, lists differences in how runs were computed, and checks limits."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from scoremode.comparison.agreement import agreement_of
from scoremode.comparison.figures import (
    OPPOSITE,
    EngineLog,
    RunComparison,
    RunFigures,
    Verdict,
    plain,
    with_interval,
)
from scoremode.comparison.groups import tokens_before
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.sizes import is_simulated
from scoremode.errors import RunError
from scoremode.kld import NEGLIGIBLE_KLD, times_the_floor
from scoremode.metrics import exp
from scoremode.runs import chat_differences, lane_difference
from scoremode.wire import ComputedBy, ServedModel


def summary(comparison: RunComparison) -> list[str]:
    """Sentences on the runs: the cost of each compared with the base, which quantizations are better or worse than
    others, how they compare with the noise floor, and which GPUs and kernels differ."""
    copies = [pair for pair in comparison.pairs if not pair.has_original]
    sentences = [*comparison.warnings, *(f"{verdict_line(comparison, row)}." for row in comparison.rows[1:])]
    sentences += _order(
        "perplexity",
        {(pair.second.label, pair.first.label): pair.verdict for pair in copies if pair.first is not comparison.base},
    )
    sentences += _order(
        "mean KL divergence",
        {(pair.second.label, pair.first.label): pair.kld_verdict for pair in copies if pair.kld_verdict is not None},
    )
    sentences += [*_lanes(comparison), *_noise_floor(comparison.runs), *agreements(comparison.runs)]
    sentences += computed_differently(comparison.files)
    if any("no interval" in (pair.verdict, pair.kld_verdict) for pair in comparison.pairs):
        sentences.append(
            "Without an interval (the text is too short, or a value is infinite) no difference can be shown."
        )
    return sentences


def verdict_line(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> str:
    """One line on the cost of a run compared with the base: with the verdict if neither is the original, the reason if
    there is no interval, the given tolerances, and a fault of the run's server. The base and logs have no verdict."""
    line, ends = f"{figures.run.label}: {', '.join(effects(comparison, figures))}", list[str]()
    pair = comparison.base_pairs.get(figures.run.label)
    if pair is not None and pair.verdict == "no interval":
        infinite = [run.label for run in (pair.first, pair.second) if math.isinf(run.nlls.max())]
        reason = f"no interval, as the NLL of a token is infinite in {' and in '.join(infinite)}"
        ends.append(reason if comparison.has_intervals else comparison.blocks)
    elif pair is not None and not pair.has_original:
        ends.append(pair.verdict)
    ends += _tolerances(comparison, figures)
    line = ": ".join(filter(None, (line, ", ".join(ends))))
    computed_by = None if pair is None else pair.second.server.computed_by
    fault = computed_by and computed_by.fault
    return f"{line} ({fault})" if fault else line


def _tolerances(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> Iterator[str]:
    """Say whether a run is within each given tolerance: its whole interval must be, or its value if it has none."""
    limits = (
        (comparison.max_ppl_increase, figures.ppl_change, 100, "% PPL"),
        (comparison.max_kld, figures.kld, 1, "KLD"),
    )
    for most, figure, scale, unit in limits:
        if most is not None and figure is not None:
            ends = (figure.value, figure.value) if figure.low is None else (figure.low, figure.high)
            low, high = (scale * end for end in ends if end is not None)
            words = "within" if high <= most else "the interval does not decide on" if low <= most else "beyond"
            alone = " by the value alone" if figure.low is None else ""
            yield f"{words} {most:g} {unit}{alone}"


def exceeded_limits(comparison: RunComparison, fail_if: Literal["worse", "differs"] | None = None) -> list[str]:
    """One line per run or log that exceeds a limit or has an infinite figure: the limits, and its `verdict_line`.

    Tolerances are checked by the values alone. `max_kld` applies to the base too, if it has a divergence. A log's
    increase of perplexity is relative to the base that it names.

    Args:
        comparison: The runs, with their tolerances.
        fail_if: A limit on the verdict: a run exceeds it if its perplexity is shown to be worse than the base's, or to
            differ from it, or if there is no interval.

    Raises:
        RunError: a limit cannot be checked: there is no base, interval or divergence.
    """
    base, max_kld, max_ppl_increase = comparison.base, comparison.max_kld, comparison.max_ppl_increase
    if len(comparison.rows) == 1 and not base.is_of_original:
        raise RunError(f"{base.label} has no base, so no limit can be checked: add a base, or a run of kld")
    if fail_if is not None and comparison.logs:
        raise RunError(
            f"--fail-if cannot be checked: {comparison.logs[0].run.label} is a log, which has no interval: leave it "
            "out, or use --max-kld or --max-ppl-increase"
        )
    if fail_if is not None and comparison.pairs and not comparison.has_intervals:
        raise RunError(f"--fail-if cannot be checked: {comparison.blocks}")
    failing = {"worse": ("worse", "no interval"), "differs": ("worse", "better", "no interval")}.get(fail_if or "", ())
    verdicts = {label: pair.verdict for label, pair in comparison.base_pairs.items()}
    lines: list[str] = []
    for figures in comparison.rows:
        label, kld, is_base, reasons = figures.run.label, figures.kld, figures.run is base, list[str]()
        if verdicts.get(label) in failing:
            reasons.append(f"--fail-if {fail_if}")
        if max_kld is not None and kld is None and not is_base:
            raise RunError(f"--max-kld: {label} has no KL divergence, which only `ppl-client kld` measures")
        if max_kld is not None and kld is not None and not (math.isfinite(kld.value) and kld.value <= max_kld):
            wrong = "" if math.isfinite(kld.value) else f" (the mean is {kld.value})"
            reasons.append(f"--max-kld {max_kld:g}{wrong}")
        if max_ppl_increase is not None and not is_base and not _increase(comparison, figures) <= max_ppl_increase:
            reasons.append(f"--max-ppl-increase {max_ppl_increase:g}")
        if reasons:
            lines.append(f"{' and '.join(reasons)}: {verdict_line(comparison, figures)}")
    return lines


def _increase(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> float:
    """The increase of perplexity over the base's in percent, for a log over the base that it names, if any; infinite if
    a perplexity is not finite."""
    log_base = figures.run.base_perplexity if isinstance(figures.run, EngineLog) else None
    difference = figures.nll.value - (comparison.runs[0].nll.value if log_base is None else math.log(log_base))
    return 100 * (exp(difference) - 1) if math.isfinite(difference) else math.inf


def effects(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> list[str]:
    """List the cost of a run: its change of perplexity with the interval, its divergence, the number of tokens for
    which answers agree (without answers, the share of same top tokens), and its size unless simulated. The base and
    logs, whose change cannot be paired, have their perplexity instead."""
    parts, change = [f"perplexity {plain(figures.perplexity.value).text}"], figures.ppl_change
    if change is not None:
        cell = with_interval(change, scale=100, sign="+")
        parts = [" ".join((cell.text, "% PPL", *cell.errors))]
    if figures.kld is not None:
        parts.append(f"KLD {plain(figures.kld.value).text}")
    if figures.agreement_median is not None:
        same = figures.agreement_median.value
        parts.append("same answer " + ("to the end" if math.isinf(same) else f"for {same:,.0f} tokens"))
    elif figures.same_top_p is not None:
        parts.append(f"same top {100 * figures.same_top_p.value:.1f} %")
    has_own_size = not isinstance(figures.run, RunFile) or not is_simulated(figures.run, comparison.base)
    if figures.run.gib and comparison.base.gib and has_own_size:
        parts.append(f"{100 * figures.run.gib / comparison.base.gib:.0f} % of the size")
    return parts


def _order(metric: str, verdicts: dict[tuple[str, str], Verdict]) -> Iterator[str]:
    """Say which runs are shown to be worse than others, and for which pairs no difference is shown. Each verdict is on
    the first run of its pair."""
    labels = [*dict.fromkeys(label for second, first in verdicts for label in (first, second))]
    both_ways = {**verdicts, **{(second, first): OPPOSITE[verdict] for (first, second), verdict in verdicts.items()}}
    undecided = [
        f"{first} and {second}" for (second, first), verdict in verdicts.items() if verdict == "no difference shown"
    ]
    if len(undecided) == len(labels) * (len(labels) - 1) / 2 > 0:
        yield f"No difference by {metric} is shown between any two copies."
        return
    betters = {label: [other for other in labels if both_ways.get((label, other)) == "worse"] for label in labels}
    for better in {tuple(others): others for others in betters.values() if others}.values():
        worse = [label for label in labels if betters[label] == better]
        yield f"{_listed(worse)} {_are(worse)} worse than {_listed(better)} by {metric}."
    if undecided:
        yield f"No difference by {metric} is shown between {', nor between '.join(undecided)}."


def _lanes(comparison: RunComparison) -> Iterator[str]:
    """Say whether another lane of a model agrees with its prefill lane."""
    before = tokens_before(comparison.files)
    for pair in comparison.pairs:
        prefill, other = sorted((pair.first, pair.second), key=lambda run: run.lane != "prefill")
        is_one_model = prefill.server.fingerprint == other.server.fingerprint is not None
        if before is None or not is_one_model or (prefill.lane == "prefill") == (other.lane == "prefill"):
            continue
        first, second, by = prefill.nlls, other.nlls, "NLL"
        # Compare the original by NLL: its divergences are only rounding, which is larger in other lanes.
        if (
            pair.kld_difference is not None
            and prefill.kld is not None
            and other.kld is not None
            and not prefill.is_of_original
        ):
            first, second, by = prefill.kld, other.kld, "KL divergence"
        verdict = lane_difference(first, second, before).verdict(other.lane)
        yield f"{other.label} and {prefill.label} by {by}: {verdict}."


def _noise_floor(runs: Sequence[RunFigures]) -> Iterator[str]:
    """Compare runs with the noise floor, except the run that the floor comes from."""
    files = [figures.run for figures in runs]
    unused = (run.reference.unused_floor(run.lane) for run in files if run.reference is not None)
    for reason in dict.fromkeys(filter(None, unused)):
        yield f"{reason[0].upper()}{reason[1:]}."
    if any(run.noise_floor == 0 and run.reference.is_batch_invariant for run in files if run.reference is not None):
        yield "The noise floor is exactly 0, because the server computes batch-invariantly."
    elif any(run.noise_floor is not None and run.noise_floor < NEGLIGIBLE_KLD for run in files):
        yield "The noise floor is below 1e-9 nats: multiples of it are not informative."
    multiples = [
        (figures.run.label, figures.kld_over_noise_floor)
        for figures in runs
        if figures.kld_over_noise_floor is not None and not figures.run.as_noise_floor
    ]
    below = [label for label, multiple in multiples if multiple <= 1]
    above = [f"{label} is {times_the_floor(multiple)}" for label, multiple in multiples if multiple > 1]
    if below:
        yield (
            f"{_listed(below)} {_are(below)} at or below the noise floor: "
            "the reference's own model diverges as much from itself in other batches."
        )
    if above:
        yield f"{_listed(above)} the noise floor by mean KL divergence."


def agreements(runs: Sequence[RunFigures]) -> Iterator[str]:
    """Say for how many tokens runs give the same answers as their reference's model, and how stop tokens and chat
    templates differ."""
    for figures in runs:
        run, median, sampled = figures.run.answers or figures.run, figures.agreement_median, figures.expected_agreement
        original = "" if run.reference is None else run.reference.model
        if run.reference is not None and not run.is_reference:
            yield from chat_differences(run.label, run.server, run.reference)
        if sampled is not None:
            yield f"{run.label} and {original}, coupled as well as can be, sample {sampled.value:.1f} same tokens."
        if median is None:
            continue
        agreement = agreement_of(run)
        num_parted, num_answers = int(agreement.parts.sum()), len(agreement.sizes)
        if not num_parted:
            yield f"No answer of {run.label} parts from that of {original}, of {num_answers:,}."
            continue
        length = "to the end" if math.isinf(median.value) else f"up to token {median.value:,.0f}"
        yield (
            f"{run.label} gives the same answer as {original} {length} in the median; "
            f"{num_answers - num_parted:,} of {num_answers:,} answers never part."
        )


def _are(items: Sequence[str]) -> str:
    return "is" if len(items) == 1 else "are"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


_IN_WORDS = {
    "implementation": "implementation",
    "device": "device",
    "num_devices": "number of devices",
    "tensor_parallel_size": "tensor parallelism",
    "pipeline_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism",
    "expert_parallel": "expert parallelism",
    "model_runner": "model runner",
    "attention_backends": "attention",
    "kernels": "kernels",
    "kv_cache_dtype": "KV cache",
    "speculative_method": "speculative decoding",
    "batch_invariant": "batch invariance",
    "eager": "eager mode",
    "cuda_graphs": "CUDA graphs",
    "compilation": "compilation",
}
"""Names of the fields of `ComputedBy`, in the order in which they are shown."""
_NOT_COMPARED = {"num_devices", "data_parallel_size", "cuda_graphs", "compilation"}
"""Fields that warnings leave out: replicas compute independently, other fields count a model's devices, and `eager`
says whether there are CUDA graphs and compilation."""


def in_words(computed_by: ComputedBy | None) -> str:
    """List all known fields as a phrase."""
    values = {} if computed_by is None else computed_by.model_dump(exclude_none=True)
    return "; ".join(f"{words} {_value(values[name])}" for name, words in _IN_WORDS.items() if name in values)


_SCHEME = re.compile(r"CompressedTensorsW\w+")


def computed_differently(runs: Sequence[RunFile]) -> list[str]:
    """Warn of differences in how runs and references were computed, in one sentence, and of each run with a known
    fault; empty if there are none.

    Kernels depend on the quantization and its schemes, so they are compared only between models with the same ones.
    """
    sources: list[tuple[str, ServedModel, str | None]] = [
        (run.label, run.server, run.lane) for run in runs if not run.is_reference
    ]
    sources += [(f"reference {other.model}", other, None) for run in runs if (other := run.reference) is not None]
    # The labels that have each value, by the field's name and, for kernels, the quantization.
    labels_by_value: dict[tuple[str, str | None], dict[str, dict[str, None]]] = {}
    for name in ("dtype", "lane", *(name for name in _IN_WORDS if name not in _NOT_COMPARED)):
        for label, model, lane in sources:
            fields = {"dtype": model.dtype, "lane": lane, **(dict(model.computed_by) if model.computed_by else {})}
            # References are often recorded in eager mode, for `layers`, and served models are usually compiled.
            is_usual = name == "eager" and lane is None
            if fields.get(name) is not None and not is_usual:
                alike = labels_by_value.setdefault((name, _scheme(model) if name == "kernels" else None), {})
                alike.setdefault(_value(fields[name]), {})[label] = None
    parts = []
    for (name, _), alike in labels_by_value.items():
        if len(alike) > 1:
            values = ", ".join(f"{value} ({', '.join(labels)})" for value, labels in alike.items())
            parts.append(f"{_IN_WORDS.get(name, name)}: {values}")
    computed = ((label, model.computed_by) for label, model, _ in sources)
    warnings = [f"{label}: {by.fault}." for label, by in computed if by is not None and by.fault]
    if parts:
        warnings.append(f"Not all was computed alike, which may be a part of the differences. {'; '.join(parts)}.")
    return warnings


def _scheme(model: ServedModel) -> str:
    """The quantization, and for compressed-tensors the classes of its schemes."""
    kernels = (model.computed_by and model.computed_by.kernels) or ()
    return " ".join([model.quantization or "", *sorted({*_SCHEME.findall(" ".join(kernels))})])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)
