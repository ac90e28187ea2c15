"""Examines a model's `compute_logits` by calling it: how much memory it takes, and whether a rank can compute its part
of the logits alone.

Most models pass hidden states to vLLM's `LogitsProcessor` and return its result. Others change the result: their logits
are gathered from all ranks, as vLLM does. The types of models do not tell the two kinds apart.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from scoremode_server.kernels.fused_logprobs import LogitsFunction
from scoremode_server.kernels.reduced_rows import Shard, true_on_every_rank

logger = init_logger(f"vllm.{__name__}")

_LOGIT_FIELDS = {
    "cohere": ("logit_scale", "scaled by"),
    "falcon_h1": ("lm_head_multiplier", "scaled by"),
    "gemma": ("final_logit_softcapping", "capped at"),
    "granite": ("logits_scaling", "divided by"),
    "hyperclovax": ("logits_scaling", "scaled by"),
    "minicpm3": ("logits_scaling", "divided by"),
    "nanochat": ("final_logit_softcapping", "capped at"),
    "recurrent_gemma": ("logits_soft_cap", "capped at"),
    "vaultgemma": ("final_logit_softcapping", "capped at"),
}
"""For each prefix of a model type: the field of the transformers library's config that changes logits, and how."""


@dataclass(frozen=True, slots=True)
class LogitsSource:
    """The call of a `LogitsProcessor` whose output was the model's logits."""

    processor: Any
    lm_head: Any
    bias: Any
    hidden_states: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class LMHead:
    """How to project hidden states onto the vocabulary."""

    whole: LogitsFunction
    """[rows, hidden] -> logits [rows, vocabulary]."""
    project: LogitsFunction
    """Like `whole`. With a shard: -> [rows, at least `shard.columns`], the logits of this rank's tokens, then
    padding."""
    copies: int | None
    """How many copies of the logits exist at the peak of `project`; None if unknown."""
    shard: Shard | None
    """This rank's part of the vocabulary, if `project` computes only that."""
    source: LogitsSource | None
    """The call that made the logits, if they are one projection that a `LogitsProcessor` scales and caps; else None."""


def examine(logits_fn: LogitsFunction, hidden_size: int, dtype: torch.dtype, group: Any) -> LMHead:
    """Find out what a model's bound `compute_logits` does by calling it. Every rank of the group must call this at the
    same time, with hidden states of the same size and dtype."""
    # Logits of zeros would hide a later change, such as scaling.
    example = torch.linspace(-1, 1, 2 * hidden_size, dtype=dtype, device=group.device).view(2, hidden_size)
    call = _observe(logits_fn, example)
    project, shard, copies, is_local = logits_fn, None, None, False
    if call is not None:
        # `LogitsProcessor` scales in place, and cuts off the vocabulary's padding with a view. Capping makes a copy.
        method = getattr(call.lm_head, "quant_method", None)
        plain = isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
        copies = 1 if plain and call.bias is None and call.processor.soft_cap is None else 2
        shard = _shard(call, group)
        if shard is not None:
            project = _without_gathering(logits_fn, call.processor)
            # A rank's own columns must equal those that it gets by gathering.
            gathered = call.output[:, shard.first : shard.first + shard.columns]
            is_local = torch.equal(project(example)[:, : shard.columns], gathered)
    if group.world_size > 1 and not true_on_every_rank(group, [is_local])[0]:
        logger.warning("Each rank gathers whole logits for prompt logprobs: how this model computes them is not known")
        project, shard = logits_fn, None
    # If the model changes hidden states before it projects them, its logits are not one projection.
    source = call if call is not None and torch.equal(call.hidden_states, example) else None
    return LMHead(logits_fn, project, copies, shard, source)


def wrong_logits(source: LogitsSource, config: Any) -> str | None:
    """Say which scale or soft cap in a model's config is not applied to its logits: vLLM's backend for the transformers
    library leaves out those that it does not know. None if all are applied or the model type is not in
    `_LOGIT_FIELDS`."""
    scale, soft_cap = source.processor.scale, source.processor.soft_cap
    applied = {"scaled by": scale, "divided by": 1 / scale, "capped at": soft_cap}
    for beginning, (name, how) in _LOGIT_FIELDS.items():
        value = getattr(config, name, None) if config.model_type.startswith(beginning) else None
        if value is not None and not math.isclose(value, applied[how] or math.inf, rel_tol=1e-6):
            return f"the model needs the config's {name} of {value:g}, but its logits are {how} {applied[how]}"
    return None


def _observe(logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> LogitsSource | None:
    """Find the call of `LogitsProcessor` whose output a model returns unchanged. None unless there is exactly one
    call."""
    signature = inspect.signature(LogitsProcessor.forward)
    calls, outputs = [], []

    def record(processor: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: torch.Tensor) -> None:
        named = signature.bind(processor, *arguments, **options).arguments
        if not named.get("skip_gather") and not processor.logits_as_input:
            bias = named.get("embedding_bias")
            calls.append(LogitsSource(processor, named["lm_head"], bias, named["hidden_states"], output))
            # Store a copy, because the model may change the output in place afterwards.
            outputs.append(output.clone())

    model = getattr(logits_fn, "__self__", None)
    if not isinstance(model, torch.nn.Module):
        return None
    # Leave out subclasses and LoRA's wrapper, which may compute anything.
    processors = [module for module in model.modules() if type(module) is LogitsProcessor]
    hooks = [processor.register_forward_hook(record, with_kwargs=True) for processor in processors]
    try:
        logits = logits_fn(hidden_states)
    finally:
        for hook in hooks:
            hook.remove()
    # NaN or infinite logits could hide a change.
    untouched = len(calls) == 1 and logits is calls[0].output and torch.equal(logits, outputs[0])
    return calls[0] if untouched and bool(logits.isfinite().all()) else None


def _shard(call: LogitsSource, group: Any) -> Shard | None:
    """Find the columns of the gathered logits that this rank computes; None if there is one rank, or another group
    divides the LM head. Gathering puts the ranks' columns side by side, and cuts off padding."""
    lm_head = call.lm_head
    if group.world_size == 1 or not isinstance(lm_head, VocabParallelEmbedding):
        return None
    if lm_head.tp_size != group.world_size or lm_head.parallel_group not in (None, group):
        return None
    per_rank = lm_head.num_embeddings_per_partition
    first = per_rank * lm_head.tp_rank
    return Shard(first, min(max(call.processor.org_vocab_size - first, 0), per_rank), group)


def _without_gathering(logits_fn: LogitsFunction, processor: LogitsProcessor) -> LogitsFunction:
    """Make a `compute_logits` that returns this rank's columns only, with padding."""

    def project(hidden_states: torch.Tensor) -> torch.Tensor:
        # An attribute on the instance hides its class's method.
        processor._gather_logits = lambda logits: logits
        try:
            return logits_fn(hidden_states)
        finally:
            del processor._gather_logits

    return project
