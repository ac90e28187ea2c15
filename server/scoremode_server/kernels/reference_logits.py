"""A reference's logits from its hidden states and its LM head, as vLLM's `LogitsProcessor` computes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Hidden states [rows, hidden], weight [columns, hidden], bias [columns] or None -> [rows, columns]."""


@dataclass(frozen=True, slots=True)
class ReferenceHead:
    """From hidden states to logits, bit for bit those of a vLLM server with the same weights and the same `linear`.

    Attributes:
        weight: [columns, hidden]. Where vLLM pads it, so must this be: the projection may round as its size has it.
        bias: [columns], or None.
        vocab_size: columns that vLLM keeps; those after them are padding. A rank that has fewer keeps its padding.
        scale: that logits are multiplied by.
        soft_cap: c in c tanh(logit / c), applied before the scale.
        linear: vLLM's unquantized projection on this machine.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    vocab_size: int
    scale: float = 1.0
    soft_cap: float | None = None
    linear: Linear = torch.nn.functional.linear

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, columns, at most `vocab_size`]."""
        logits = self.linear(hidden_states, self.weight, self.bias)[..., : self.vocab_size]
        # vLLM makes three copies of them here; the numbers are the same.
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits


def linear_in(dtype: torch.dtype) -> Linear:
    """vLLM's projection where the head's dtype is not the dtype of hidden states and weight."""

    def linear(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if dtype == torch.float32 and hidden_states.is_cuda:
            logits = torch.mm(hidden_states, weight.t(), out_dtype=dtype)
            return logits if bias is None else logits.add_(bias.to(dtype))
        wide_bias = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(hidden_states.to(dtype), weight.to(dtype), wide_bias)

    return linear
