"""Adapters next to prompt logprobs, whose rows vLLM's adapters know nothing of."""

import pytest
import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

from scoremode_server.vllm_patches import install


def test_an_adapter_for_the_lm_head_is_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(LogitsProcessorWithLoRA, "set_lora", LogitsProcessorWithLoRA.set_lora)
    install.refuse_adapters_of_heads()
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked, layer.lora_b_stacked = torch.ones(1, 1, 8, 16), torch.ones(1, 1, 32, 8)
    with pytest.raises(ValueError, match="weights for the LM head"):
        layer.set_lora(0, torch.zeros(8, 16), torch.ones(32, 8))
    # As vLLM's own, with which it warms up: a server would not start.
    layer.set_lora(0, torch.zeros(8, 16), torch.zeros(32, 8))
    assert not layer.lora_b_stacked.any()
