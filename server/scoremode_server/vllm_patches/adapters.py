"""LoRA adapters next to prompt logprobs.

vLLM keeps one adapter for each sequence of a step whose logits are sampled from, and takes them by row. Prompt logprobs
have other rows. An adapter without weights for the LM head adds nothing to logits, whatever its row; one that has some
would add them to the rows of other requests.
"""

from typing import Any

import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA


def patch() -> None:
    """Refuse adapters with weights for the LM head when they are loaded."""
    set_lora = LogitsProcessorWithLoRA.set_lora

    def set_lora_of_zeros(self: Any, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        # vLLM warms up with adapters of zeros for every layer.
        if lora_b.any():
            raise ValueError(
                "this adapter has weights for the LM head, with which vLLM would make prompt logprobs of other "
                "adapters' logits; merge it into the model, or serve it without Scoremode"
            )
        set_lora(self, index, lora_a, lora_b)

    LogitsProcessorWithLoRA.set_lora = set_lora_of_zeros
