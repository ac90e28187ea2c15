"""What is behind a model's `compute_logits`, found out by one call: how much memory it takes, and what of it is local.

Most models hand hidden states to vLLM's `LogitsProcessor` and return what comes back. Some change that once more: they
mask tokens, scale, cap. For these nothing is assumed here, and their logits are gathered as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a `LogitsProcessor`; `before` is a copy of its output as it was when it returned."""

    processor: Any
    lm_head: Any
    bias: Any
    output: torch.Tensor
    before: torch.Tensor


def copies_at_peak(logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> int | None:
    """How many times over a model holds its logits while it computes them, None where that is not known.

    Scaling is in place in `LogitsProcessor`, and cutting off the vocabulary's padding is a view; capping is neither.

    Args:
        logits_fn: a model's bound `compute_logits`; it is called once.
        hidden_states: [rows, hidden], zeros will do.
    """
    call = _observe(logits_fn, hidden_states)
    if call is None:
        return None
    plain = isinstance(call.lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    return 1 if plain and call.bias is None and call.processor.soft_cap is None else 2


def _observe(logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> _Call | None:
    """The one call of a `LogitsProcessor` whose output a model returns untouched, or None."""
    calls = []

    def record(processor: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: torch.Tensor) -> None:
        lm_head, _, bias, *_ = (*arguments, None)
        calls.append(_Call(processor, lm_head, options.get("embedding_bias", bias), output, output.clone()))

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
    if len(calls) != 1 or logits is not calls[0].output or not torch.equal(logits, calls[0].before):
        return None
    return calls[0]
