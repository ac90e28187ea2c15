"""Checkpoints in every format: compressed-tensors reads from them what the oracle reads, and it is near the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FORMATS, pad_heads, write_checkpoint
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from quantized_oracle import WEIGHT_PARTS, dequantized_weight, logprobs, oracle_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests import oracle

LARGEST_ERROR = {"w4a16": 0.12, "nvfp4a16": 0.12, "fp8": 0.03, "int8": 0.015}
"""Root mean square of a layer's error over that of its weights, which are normally distributed. Rounding to nearest
gives 0.10 with 15 levels for 64 weights, 0.09 to FP4, 0.026 to FP8 (three bits after the point), 0.008 to int8."""


DECOMPRESSED_TOLERANCE = {"w4a16": 0.1, "fp8": 1e-5, "int8": 1e-5}
"""Nats. transformers decompresses to the dtype of the scales, where the oracle keeps code times scale in float32. NVFP4
it cannot run in float32: the decompressed weights stay in bfloat16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random blocks in bfloat16, embeddings tied, no group of 128 in any width, as in SmolLM2."""
    folder = tmp_path_factory.mktemp("models") / "bfloat16"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = LlamaForCausalLM(config)
        # Layers that vLLM fuses, of different sizes: the case in which their scales must be shared.
        for block in llama.model.layers:
            block.self_attn.v_proj.weight.data *= 0.3
            block.mlp.up_proj.weight.data *= 2
        llama.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(model, tmp_path_factory.mktemp("checkpoints") / request.param, request.param)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 512, (2, 48)).tolist()


def layers(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The parts of each quantized layer."""
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    return {
        name: {part: tensors[f"{name}.{part}"] for part in WEIGHT_PARTS if f"{name}.{part}" in tensors}
        for name in names
    }


def test_weights_are_what_compressed_tensors_reads(checkpoint: Path):
    config = QuantizationConfig(**json.loads((checkpoint / "config.json").read_text())["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry(config.format)
    scheme = config.config_groups["group_0"]
    found = layers(checkpoint)
    assert len(found) == 2 * 7
    for parts in found.values():
        theirs = compressor.decompress(parts, scheme)["weight"]
        # compressed-tensors rounds the product of code and scale to the dtype that the scale is kept in.
        assert torch.equal(dequantized_weight(parts).to(theirs.dtype), theirs)


def test_weights_are_near_the_models(checkpoint: Path, model: Path):
    original = load_file(model / "model.safetensors")
    for name, parts in layers(checkpoint).items():
        weight = original[f"{name}.weight"].float()
        error = (dequantized_weight(parts) - weight).square().mean().sqrt() / weight.square().mean().sqrt()
        assert 0.001 < error < LARGEST_ERROR[checkpoint.name], name


def test_other_tensors_are_kept(checkpoint: Path, model: Path):
    kept = load_file(checkpoint / "model.safetensors")
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(kept[name], tensor)


def test_layers_that_vllm_fuses_share_their_global_scale(model: Path, tmp_path: Path):
    found = layers(write_checkpoint(model, tmp_path, "nvfp4a16"))
    for block in ("model.layers.0", "model.layers.1"):
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = {found[f"{block}.{name}"]["weight_global_scale"].item() for name in fused}
            largest = max(found[f"{block}.{name}"]["weight_scale"].float().max().item() for name in fused)
            assert len(scales) == 1
            assert largest == 448


def test_padded_heads_change_nothing(model: Path, tmp_path: Path, windows: list[list[int]]):
    padded = pad_heads(model, tmp_path, 6, 2)
    config = json.loads((padded / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (6, 2)
    for ours, expected in zip(oracle.logprobs(padded, windows), oracle.logprobs(model, windows), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6, rtol=0)


def test_heads_are_not_padded_to_groups_of_another_size(model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="3 on 1 heads cannot grow to 4 on 2"):
        pad_heads(model, tmp_path, 4, 2)


@pytest.mark.parametrize("name", DECOMPRESSED_TOLERANCE)
def test_decompressed_scores_are_those_of_transformers(
    name: str, model: Path, tmp_path: Path, windows: list[list[int]]
):
    checkpoint = write_checkpoint(model, tmp_path, name)
    decompressed = oracle_model(checkpoint, quantized_activations=False)
    expected = oracle.decompressed_logprobs(checkpoint, windows)
    for ours, theirs in zip(logprobs(decompressed, windows), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=DECOMPRESSED_TOLERANCE[name], rtol=0)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantized_activations_show_in_the_scores(name: str, model: Path, tmp_path: Path, windows: list[list[int]]):
    folder = write_checkpoint(model, tmp_path, name)
    quantized, decompressed = (
        np.concatenate(logprobs(oracle_model(folder, quantized_activations=activations), windows))
        for activations in (True, False)
    )
    assert 1e-3 < np.abs(quantized - decompressed).mean() < 0.3
