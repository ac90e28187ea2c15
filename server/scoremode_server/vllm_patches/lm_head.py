"""What a model's `compute_logits` does, found out by calling it: how much memory it takes, and what part is local.

Most models hand hidden states to vLLM's `LogitsProcessor` and return its result. Some change that once more: they
mask tokens, scale, cap. Nothing is assumed of these, and their logits are gathered from all ranks as in vLLM. Types do
not tell the two kinds apart, so a trial call does.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from scoremode_server.kernels.tensor_parallel import Shard, agreed

logger = init_logger(f"vllm.{__name__}")

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LogitsSource:
    """What a `LogitsProcessor` was called with when its output was the model's logits."""

    processor: Any
    lm_head: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class LMHead:
    """How to project hidden states onto the vocabulary."""

    project: LogitsFunction
    """[rows, hidden] -> logits [rows, vocabulary], or those of the shard's tokens, maybe with padding after them."""
    copies: int | None
    """How many times over the logits are held at the peak of it; None where that is not known."""
    shard: Shard | None
    """Of the vocabulary, where each rank of a group keeps to its own."""
    source: LogitsSource | None
    """Where its logits are one projection that vLLM's `LogitsProcessor` scales and caps, and nothing else."""


@dataclass(frozen=True, slots=True)
class _Call(LogitsSource):
    """With its input, its output, and a copy of that as it was when it returned."""

    hidden_states: torch.Tensor
    output: torch.Tensor
    before: torch.Tensor


def examine(logits_fn: LogitsFunction, hidden_size: int, dtype: torch.dtype, group: Any) -> LMHead:
    """Find out what a model's bound `compute_logits` does by calling it. Every rank of the group must do so at the same
    time, with hidden states of the same size and dtype."""
    # Not zeros, whose logits would hide a change that is made to them afterwards.
    example = torch.linspace(-1, 1, 2 * hidden_size, dtype=dtype, device=group.device).view(2, hidden_size)
    call = _observe(logits_fn, example)
    shard = _shard(call, group) if call else None
    local = _LocalProjection(logits_fn, call.processor) if call else None
    # What a rank computes by itself must be the very columns that it gets from all.
    same = call is not None and shard is not None and local is not None and _same(local(example), shard, call.output)
    if group.world_size > 1 and not agreed(group, [same])[0]:
        logger.warning(
            "Prompt logprobs gather the whole vocabulary on each rank: the module that computes logits is not known"
        )
        shard = None
    copies = _copies(call) if call else None
    # Some models scale hidden states before they project them.
    source = call if call is not None and torch.equal(call.hidden_states, example) else None
    if shard is None or local is None:
        return LMHead(logits_fn, copies, None, source)
    logger.info("Prompt logprobs of each of %d ranks keep to its part of the vocabulary", group.world_size)
    return LMHead(local, copies, shard, source)


def _copies(call: LogitsSource) -> int:
    # Scaling is in place in `LogitsProcessor`, and cutting off the vocabulary's padding is a view; capping is neither.
    method = getattr(call.lm_head, "quant_method", None)
    plain = isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    return 1 if plain and call.bias is None and call.processor.soft_cap is None else 2


def _observe(logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> _Call | None:
    """The one call of a `LogitsProcessor` whose output a model returns untouched, or None."""
    signature = inspect.signature(LogitsProcessor.forward)
    calls = []

    def record(processor: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: torch.Tensor) -> None:
        named = signature.bind(processor, *arguments, **options).arguments
        if not named.get("skip_gather") and not processor.logits_as_input:
            bias = named.get("embedding_bias")
            calls.append(_Call(processor, named["lm_head"], bias, named["hidden_states"], output, output.clone()))

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
    untouched = len(calls) == 1 and logits is calls[0].output and torch.equal(logits, calls[0].before)
    return calls[0] if untouched and bool(logits.isfinite().all()) else None


def _shard(call: _Call, group: Any) -> Shard | None:
    """The columns of the gathered logits that this rank computes: those of all ranks side by side, cut off after the
    vocabulary."""
    lm_head = call.lm_head
    if group.world_size == 1 or not isinstance(lm_head, VocabParallelEmbedding):
        return None
    if lm_head.tp_size != group.world_size or lm_head.parallel_group not in (None, group):
        return None
    per_rank = lm_head.num_embeddings_per_partition
    first = per_rank * lm_head.tp_rank
    return Shard(first, min(max(call.processor.org_vocab_size - first, 0), per_rank), group)


def _same(local: torch.Tensor, shard: Shard, gathered: torch.Tensor) -> bool:
    return bool(torch.equal(local[:, : shard.columns], gathered[:, shard.first : shard.first + shard.columns]))


class _LocalProjection:
    """A model's `compute_logits` without the gathering of all ranks' logits."""

    def __init__(self, logits_fn: LogitsFunction, processor: LogitsProcessor) -> None:
        self._logits_fn = logits_fn
        self._processor = processor

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, columns of this rank, and padding]."""
        # An attribute of the object hides the method of its class.
        self._processor._gather_logits = lambda logits: logits
        try:
            return self._logits_fn(hidden_states)
        finally:
            del self._processor._gather_logits
