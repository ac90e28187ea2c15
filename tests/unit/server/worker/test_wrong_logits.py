"""A config's scale and cap of logits are compared with the models of transformers: a probe instead of the LM head's
output shows by how much each scales its logits, and where it caps them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from scoremode_server.worker.lm_head import wrong_logits

VOCABULARY = 32
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "granitemoeshared": {"logits_scaling": 6.0},
    "granitemoehybrid": {
        **{"logits_scaling": 4.0, "mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["full_attention"]}
    },
    "granite_swa": {"logits_scaling": 5.0},
    "hyperclovax": {"logits_scaling": 0.125},
    "minicpm3": {
        **{"dim_model_base": 8, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    },
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.04},
    "gemma2": {},
    "gemma3_text": {"final_logit_softcapping": 20.0},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "gemma4_text": {"final_logit_softcapping": 25.0},
    "vaultgemma": {},
    "nanochat": {},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
WITHOUT = ["llama", "qwen3", "gemma", "gemma3_text", "granite"]
"""Their configs have no scale and no cap by default."""


def logits_of_probe(config: PretrainedConfig) -> tuple[float, float | None]:
    """The factor by which transformers multiplies small logits, the head's input included, and where it caps large
    ones."""
    model = AutoModelForCausalLM.from_config(config).eval()
    probe, seen = torch.zeros(VOCABULARY), dict[str, torch.Tensor]()
    probe[:2] = torch.tensor([2**-10, 2**20])

    def replace_logits(_: Any, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        seen["fed"] = inputs[0]
        return probe.expand_as(logits).clone()

    model.base_model.register_forward_hook(lambda _, inputs, output: seen.update(hidden=output[0]))
    model.lm_head.register_forward_hook(replace_logits)
    with torch.inference_mode():
        small, large = model(torch.tensor([[3, 4, 5]])).logits[0, -1, :2].tolist()
    scale = 2**10 * small * (seen["fed"].norm() / seen["hidden"].norm()).item()
    return scale, None if large == small * 2**30 else large


def fault(config: PretrainedConfig, scale: float, soft_cap: float | None) -> str | None:
    processor = SimpleNamespace(scale=scale, soft_cap=soft_cap)
    return wrong_logits(SimpleNamespace(processor=processor), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "fields"), [*FAMILIES.items(), *((family, None) for family in WITHOUT)])
def test_logits_of_transformers_are_right_and_those_that_a_backend_drops_are_named(family, fields):
    config = AutoConfig.for_model(family, **{**SIZES, **(fields or {})})
    scale, soft_cap = logits_of_probe(config)
    assert fault(config, scale, soft_cap) is None
    found = fault(config, 1.0, None)
    assert (found is None) == (fields is None)
    assert ("but its logits are capped at None" in (found or "")) == (soft_cap is not None)
    assert (found or "").endswith(("scaled by 1.0", "divided by 1.0")) == (scale != 1)
