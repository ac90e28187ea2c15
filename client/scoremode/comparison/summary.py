"""A comparison in a few sentences, what computed its runs besides their weights, and the limits that they exceed."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from scoremode.comparison.agreement import agreement_of
from scoremode.comparison.figures import OPPOSITE, EngineLog, RunComparison, RunFigures, Verdict, plain, with_errors
from scoremode.comparison.groups import tokens_before
from scoremode.comparison.run_file import RunFile
from scoremode.errors import RunError
from scoremode.kld import times_the_floor
from scoremode.metrics import exp
from scoremode.runs import chat_differences, lane_difference
from scoremode.wire import ComputedBy, ServedModel


def summary(comparison: RunComparison) -> list[str]:
    """Sentences on the runs: which are better or worse, where no difference is shown, how they compare with the noise
    floor, and which GPUs and kernels differ."""
    # Any model diverges more than the reference's own.
    compared = [each.run.label for each in comparison.runs if each.kld is not None and not each.has_no_divergence]
    sentences = [*comparison.warnings]
    by_nll: dict[tuple[str, str], Verdict] = {}
    by_kld: dict[tuple[str, str], Verdict] = {}
    for pair in comparison.pairs:
        first, second, ratio = pair.first.label, pair.second.label, pair.ppl_ratio
        if pair.first is comparison.base and pair.verdict in ("better", "worse"):
            times = " ".join((f"{ratio.value:.4f} times its perplexity", *with_errors(ratio, 4).errors[1:]))
            sentences.append(f"{second} is {pair.verdict} than {first}: {times}.")
        else:
            by_nll[second, first] = pair.verdict
        if pair.kld_verdict is not None and first in compared and second in compared:
            by_kld[second, first] = pair.kld_verdict
    sentences += _order("perplexity", [run.label for run in comparison.files], by_nll)
    if by_kld:
        sentences += _order("mean KL divergence", compared, by_kld)
    sentences += [*_lanes(comparison), *_noise_floor(comparison.runs), *agreements(comparison.runs)]
    sentences += computed_differently(comparison.files)
    if any("no interval" in (pair.verdict, pair.kld_verdict) for pair in comparison.pairs):
        sentences.append(
            "Without an interval (the text is too short, or a value is infinite) no difference can be shown."
        )
    return sentences


def verdict_line(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> str:
    """One line on the cost of a run against the base, with the verdict, or why there is none. The base and logs have
    their figures alone."""
    line = f"{figures.run.label}: {', '.join(effects(comparison, figures))}"
    pair = comparison.base_pairs.get(figures.run.label)
    if pair is None:
        return line
    verdict: str = pair.verdict
    if verdict == "no interval":
        infinite = [run.label for run in (pair.first, pair.second) if math.isinf(run.nlls.max())]
        reason = f"no interval, as the NLL of a token is infinite in {' and in '.join(infinite)}"
        verdict = reason if comparison.has_intervals else comparison.blocks
    computed_by = pair.second.server.computed_by
    return f"{line}: {verdict} ({computed_by.fault})" if computed_by and computed_by.fault else f"{line}: {verdict}"


def exceeded_limits(
    comparison: RunComparison,
    fail_if: Literal["worse", "differs"] | None = None,
    max_kld: float | None = None,
    max_ppl_increase: float | None = None,
) -> list[str]:
    """One line per row that exceeds a limit, or whose figure is not finite: which, and its verdict.

    Args:
        fail_if: By perplexity, a run is worse than the base, or is shown to differ from it.
        max_kld: Nats, in the mean; the base has to keep to it too, if it has a divergence.
        max_ppl_increase: Of the base's perplexity, as a percentage; in a log, of that of the base which it names.

    Raises:
        RunError: a limit cannot be checked: there is no base, interval or divergence.
    """
    base = comparison.base
    if len(comparison.rows) == 1 and not base.is_of_original:
        raise RunError(f"{base.label} has no base, so no limit can be checked: give one, or a run of kld")
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
    """The increase of perplexity in percent, from the base of a log where it names one; infinite where a perplexity is
    not finite."""
    named = figures.run.base_perplexity if isinstance(figures.run, EngineLog) else None
    difference = figures.nll.value - (comparison.runs[0].nll.value if named is None else math.log(named))
    return 100 * (exp(difference) - 1) if math.isfinite(difference) else math.inf


def effects(comparison: RunComparison, figures: RunFigures[RunFile | EngineLog]) -> list[str]:
    """The cost of a run: its change of perplexity, its divergence, and its size; of the base and of a log, which have
    no change that is paired, the perplexity."""
    parts = [f"perplexity {plain(figures.perplexity.value).text}"]
    if figures.ppl_change is not None:
        change = with_errors(figures.ppl_change, scale=100, sign="+")
        stderr, interval = (*change.errors, "", "")[:2]
        parts = [" ".join(filter(None, (change.text, stderr, "% PPL", interval)))]
    if figures.kld is not None:
        kld = with_errors(figures.kld)
        parts.append(" ".join(("KLD", kld.text, *kld.errors[:1])))
    if figures.same_top_p is not None:
        parts.append(f"same top {100 * figures.same_top_p.value:.1f} %")
    if figures.run.gib and comparison.base.gib:
        parts.append(f"{100 * figures.run.gib / comparison.base.gib:.0f} % of the size")
    return parts


def _order(what: str, labels: Sequence[str], verdicts: dict[tuple[str, str], Verdict]) -> Iterator[str]:
    """Say which runs are shown to be worse than others, and for which pairs nothing is shown. A verdict is on the first
    of two."""
    both_ways = {**verdicts, **{(second, first): OPPOSITE[verdict] for (first, second), verdict in verdicts.items()}}
    undecided = [
        f"{first} and {second}" for (second, first), verdict in verdicts.items() if verdict == "no difference shown"
    ]
    if len(undecided) == len(labels) * (len(labels) - 1) / 2 > 0:
        yield f"No difference by {what} is shown between any two runs."
        return
    betters = {label: [other for other in labels if both_ways.get((label, other)) == "worse"] for label in labels}
    for better in {tuple(each): each for each in betters.values() if each}.values():
        worse = [label for label in labels if betters[label] == better]
        yield f"{_listed(worse)} {_are(worse)} worse than {_listed(better)} by {what}."
    if undecided:
        yield f"No difference by {what} is shown between {', nor between '.join(undecided)}."


def _lanes(comparison: RunComparison) -> Iterator[str]:
    """Whether another lane of a model agrees with its prefill lane."""
    before = tokens_before(comparison.files)
    for pair in comparison.pairs:
        prefill, other = sorted((pair.first, pair.second), key=lambda run: run.lane != "prefill")
        is_one_model = prefill.server.fingerprint == other.server.fingerprint is not None
        if before is None or not is_one_model or (prefill.lane == "prefill") == (other.lane == "prefill"):
            continue
        first, second, by = prefill.nlls, other.nlls, "NLL"
        # By rounding a model diverges from itself more in the other lane.
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
    """Nothing of the reference's own run, which the floor is made of."""
    unused = (run.reference.unused_floor(run.lane) for run in (each.run for each in runs) if run.reference is not None)
    for reason in dict.fromkeys(filter(None, unused)):
        yield f"{reason[0].upper()}{reason[1:]}."
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
    """For how long runs give the same answers as their reference's model."""
    for figures in runs:
        run, median, sampled = figures.run, figures.agreement_median, figures.expected_agreement
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
}
"""In the order in which they are shown."""
_WITHOUT_INFLUENCE = {"num_devices", "data_parallel_size"}
"""Replicas compute alike, each by itself; how many GPUs share a model, the other sizes say."""


def in_words(computed_by: ComputedBy | None) -> str:
    """All that is known of it."""
    values = {} if computed_by is None else computed_by.model_dump(exclude_none=True)
    return "; ".join(f"{words} {_value(values[name])}" for name, words in _IN_WORDS.items() if name in values)


_SCHEME = re.compile(r"CompressedTensorsW\w+")


def computed_differently(runs: Sequence[RunFile]) -> list[str]:
    """A sentence of what two runs are known to differ by, or a run and its reference, and one of each run whose kernel
    computes wrongly; none where there is nothing.

    Kernels are those of a quantization and its schemes: they are compared among equal ones.
    """
    sources: list[tuple[str, ServedModel, str | None]] = [
        (run.label, run.server, run.lane) for run in runs if not run.is_reference
    ]
    sources += [(f"reference {each.model}", each, None) for run in runs if (each := run.reference) is not None]
    # By what it is and, of kernels, the quantization: every value with the labels that have it.
    labels_by_value: dict[tuple[str, str | None], dict[str, dict[str, None]]] = {}
    for name in ("dtype", "lane", *(name for name in _IN_WORDS if name not in _WITHOUT_INFLUENCE)):
        for label, model, lane in sources:
            fields = {"dtype": model.dtype, "lane": lane, **(dict(model.computed_by) if model.computed_by else {})}
            if fields.get(name) is not None:
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
    """The quantization and, of compressed-tensors, the classes of the schemes in which layers are quantized."""
    kernels = (model.computed_by and model.computed_by.kernels) or ()
    return " ".join([model.quantization or "", *sorted({*_SCHEME.findall(" ".join(kernels))})])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)
