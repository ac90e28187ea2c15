"""Scoring on engines that draft tokens while they generate, compared with transformers.

A drafter's CUDA graph shares memory with the model's, and a prompt of which one token is left is padded for drafts.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scoremode_server import enable
from tests import models
from tests.engine.test_engine_drafts import NGRAMS, check_scores_next_to_drafts
from tests.gpu.conftest import ON_GPU, RUNNERS, SCALE

METHODS = ("n-grams", "draft model", "EAGLE") if ON_GPU else ("n-grams",)
MODES = ("graphs", "eager") if ON_GPU else ("eager",)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """vLLM's `speculative_config` for each method."""
    folder = tmp_path_factory.mktemp("drafters")
    draft = models.random_llama(folder / "draft", seed=1, num_layers=1)
    eagle = models.random_llama(folder / "eagle", seed=2, num_layers=1)
    tensors = load_file(eagle / "model.safetensors")
    head = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    # It has the shape: from a token's embedding and the model's hidden state to a hidden state.
    head["fc.weight"] = head["layers.0.mlp.down_proj.weight"].clone()
    save_file(head, eagle / "model.safetensors", {"format": "pt"})
    return {
        "n-grams": NGRAMS,
        "draft model": {"method": "draft_model", "model": str(draft)},
        "EAGLE": {"method": "eagle", "model": str(eagle)},
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS if ON_GPU else ("v1",))
@pytest.mark.parametrize("method", METHODS)
def test_scores_next_to_drafts_equal_transformers(
    random_model: Path,
    drafters: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    runner: str,
    mode: str,
):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    enable()
    variable, value, _ = RUNNERS[runner]
    monkeypatch.setenv(variable, value)
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**31}
    check_scores_next_to_drafts(random_model, drafters[method], scale=SCALE, enforce_eager=mode == "eager", **memory)
