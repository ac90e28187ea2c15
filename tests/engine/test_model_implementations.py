"""A random Granite in vLLM's own class, and in its backend for models of transformers, which leaves out the scale of
Granite's logits: the worker says which computes, and whether its logits are the model's."""

from pathlib import Path

import pytest
from transformers import GraniteConfig

from tests.engine.conftest import small_engine

LOGITS_SCALING = 8.0
FAULT = "the model needs the config's logits_scaling of 8, but its logits are divided by 1.0"


@pytest.fixture(scope="module")
def granite(models, tmp_path_factory) -> Path:
    config = GraniteConfig(
        **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
        **{"logits_scaling": LOGITS_SCALING, "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1},
    )
    return models.random_model_of(config, tmp_path_factory.mktemp("models") / "granite")


@pytest.mark.parametrize(("implementation", "fault"), [("vllm", None), ("transformers", FAULT)])
def test_the_worker_says_what_computes_and_what_its_logits_lack(granite, environment, implementation, fault):
    llm = small_engine(
        granite, max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=16, model_impl=implementation
    )
    try:
        [described] = llm.collective_rpc("scoremode_computed_by")
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert (described["implementation"], described.get("wrong_logits")) == (implementation, fault)
