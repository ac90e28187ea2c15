"""What computed the runs of a comparison, besides their weights, and by what of it they differ."""

from collections.abc import Iterator, Sequence

from scoremode.comparison.run_file import RunFile
from scoremode.protocol import ComputedBy

_IN_WORDS = {
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
    known = {} if computed_by is None else computed_by.model_dump(exclude_none=True)
    return "; ".join(f"{words} {_value(known[name])}" for name, words in _IN_WORDS.items() if name in known)


def computed_differently(runs: Sequence[RunFile]) -> list[str]:
    """A sentence of what two runs are known to differ by, or a run and its reference; none where there is nothing.

    Kernels are those of a quantization: they are compared among equal ones.
    """
    parts = []
    for name, words in _IN_WORDS.items():
        if name in _WITHOUT_INFLUENCE:
            continue
        found: dict[str | None, dict[str, dict[str, None]]] = {}
        for label, quantization, computed_by in _all_computed(runs):
            if (value := getattr(computed_by, name)) is not None:
                alike = found.setdefault(quantization if name == "kernels" else None, {})
                alike.setdefault(_value(value), {})[label] = None
        parts += [
            f"{words}: " + ", ".join(f"{value} ({', '.join(labels)})" for value, labels in values.items())
            for values in found.values()
            if len(values) > 1
        ]
    if not parts:
        return []
    return [f"Not all was computed alike, which may be a part of the differences. {'; '.join(parts)}."]


def _all_computed(runs: Sequence[RunFile]) -> Iterator[tuple[str, str | None, ComputedBy]]:
    """Label, quantization and what computed it, of runs and of their references, where that is known."""
    for run in runs:
        if run.server.computed_by is not None:
            yield run.label, run.server.quantization, run.server.computed_by
    for run in runs:
        reference = run.reference
        if reference is not None and reference.computed_by is not None:
            yield f"reference {reference.name}", reference.quantization, reference.computed_by


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)
