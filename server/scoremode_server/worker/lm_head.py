"""Examines a model's `compute_logits` by calling it: how much memory it takes, and what part is local.

Most models hand hidden states to vLLM's `LogitsProcessor` and return its result. Some change that once more: nothing is
assumed of these, and their logits are gathered from all ranks as in vLLM. Types do not tell the two kinds apart.
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
"""By how model types begin: the field of the transformers library's config that changes logits, and how."""


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
    """The same, or [rows, hidden] -> logits of the shard's tokens, maybe with padding after them."""
    copies: int | None
    """How many copies of the logits exist at the peak of `project`; None if unknown."""
    shard: Shard | None
    """This rank's part of the vocabulary, if `project` computes that alone."""
    source: LogitsSource | None
    """The call that made the logits, if they are one projection that a `LogitsProcessor` scales and caps; else None."""


def examine(logits_fn: LogitsFunction, hidden_size: int, dtype: torch.dtype, group: Any) -> LMHead:
    """Find out what a model's bound `compute_logits` does by calling it. Every rank of the group must do so at the same
    time, with hidden states of the same size and dtype."""
    # Not zeros, whose logits would hide a change that is made to them afterwards.
    example = torch.linspace(-1, 1, 2 * hidden_size, dtype=dtype, device=group.device).view(2, hidden_size)
    call = _observe(logits_fn, example)
    project, shard, copies, is_local = logits_fn, None, None, False
    if call is not None:
        # Scaling is in place in `LogitsProcessor`, and cutting off the vocabulary's padding is a view; capping is not.
        method = getattr(call.lm_head, "quant_method", None)
        plain = isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
        copies = 1 if plain and call.bias is None and call.processor.soft_cap is None else 2
        shard = _shard(call, group)
        if shard is not None:
            project = _without_gathering(logits_fn, call.processor)
            # What a rank computes by itself must be the very columns that it gets from all.
            gathered = call.output[:, shard.first : shard.first + shard.columns]
            is_local = torch.equal(project(example)[:, : shard.columns], gathered)
    if group.world_size > 1 and not true_on_every_rank(group, [is_local])[0]:
        logger.warning("Prompt logprobs gather the vocabulary on each rank: what computes logits is not known")
        project, shard = logits_fn, None
    # Some models scale hidden states before they project them.
    source = call if call is not None and torch.equal(call.hidden_states, example) else None
    return LMHead(logits_fn, project, copies, shard, source)


def wrong_logits(source: LogitsSource, config: Any) -> str | None:
    """Say which scale or soft cap of a model's config its logits lack, as vLLM's backend for the transformers library
    leaves out those that it does not know. None for a config that has none, or is of a family not known here."""
    scale, soft_cap = source.processor.scale, source.processor.soft_cap
    applied = {"scaled by": scale, "divided by": 1 / scale, "capped at": soft_cap}
    for beginning, (name, how) in _LOGIT_FIELDS.items():
        value = getattr(config, name, None) if config.model_type.startswith(beginning) else None
        if value is not None and not math.isclose(value, applied[how] or math.inf, rel_tol=1e-6):
            return f"the model needs the config's {name} of {value:g}, but its logits are {how} {applied[how]}"
    return None


def _observe(logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> LogitsSource | None:
    """The one call of a `LogitsProcessor` whose output a model returns untouched, or None."""
    signature = inspect.signature(LogitsProcessor.forward)
    calls, outputs = [], []

    def record(processor: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: torch.Tensor) -> None:
        named = signature.bind(processor, *arguments, **options).arguments
        if not named.get("skip_gather") and not processor.logits_as_input:
            bias = named.get("embedding_bias")
            calls.append(LogitsSource(processor, named["lm_head"], bias, named["hidden_states"], output))
            # As they are when it returns.
            outputs.append(output.clone())

    model = getattr(logits_fn, "__self__", None)
    if not isinstance(model, torch.nn.Module):
        return None
    # A subclass, or the layer that LoRA puts around it, may do anything.
    processors = [module for module in model.modules() if type(module) is LogitsProcessor]
    hooks = [processor.register_forward_hook(record, with_kwargs=True) for processor in processors]
    try:
        logits = logits_fn(hidden_states)
    finally:
        for hook in hooks:
            hook.remove()
    # Where a logit is NaN, a change could not be seen.
    untouched = len(calls) == 1 and logits is calls[0].output and torch.equal(logits, outputs[0])
    return calls[0] if untouched and bool(logits.isfinite().all()) else None


def _shard(call: LogitsSource, group: Any) -> Shard | None:
    """The columns of the gathered logits that this rank computes. Gathering puts those of all ranks side by side, and
    cuts them off after the vocabulary."""
    lm_head = call.lm_head
    if group.world_size == 1 or not isinstance(lm_head, VocabParallelEmbedding):
        return None
    if lm_head.tp_size != group.world_size or lm_head.parallel_group not in (None, group):
        return None
    per_rank = lm_head.num_embeddings_per_partition
    first = per_rank * lm_head.tp_rank
    return Shard(first, min(max(call.processor.org_vocab_size - first, 0), per_rank), group)


def _without_gathering(logits_fn: LogitsFunction, processor: LogitsProcessor) -> LogitsFunction:
    """A model's `compute_logits` that gives this rank's columns, and padding."""

    def project(hidden_states: torch.Tensor) -> torch.Tensor:
        # An attribute of the object hides the method of its class.
        processor._gather_logits = lambda logits: logits
        try:
            return logits_fn(hidden_states)
        finally:
            del processor._gather_logits

    return project
