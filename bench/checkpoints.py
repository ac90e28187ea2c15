"""Checkpoints of one model in every format that is deployed, in compressed-tensors' layouts, rounded to nearest.

Scales are those that compressed-tensors computes from the largest weight of a channel or group; no data calibrates
them. That is the crudest way to quantize, and enough to compare two implementations of a format.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from quantized_oracle import DEVICE
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from rounded_model import copy_all_but_weights

Tensors = dict[str, torch.Tensor]

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM runs as one, with one NVFP4 global scale for all of them: where they differ it takes the largest,
and the others' weights come out wrong."""

FORMATS: dict[str, QuantizationScheme] = {
    "w4a16": preset_name_to_scheme("W4A16", ["Linear"]),
    "nvfp4a16": preset_name_to_scheme("NVFP4A16", ["Linear"]),
    "fp8": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]),
    "int8": preset_name_to_scheme("W8A8", ["Linear"]),
}
"""How each format quantizes linear layers, rounded to nearest."""
CALIBRATED = "w4a16-gptq"
"""W4A16 by calibrate.py, with the packages in the folder that the environment variable LLM_COMPRESSOR names."""


def write_checkpoint(source: Path, folder: Path, name: str, kept: Sequence[str] = ()) -> Path:
    """Write `source` (one safetensors file) in the format `name`; layers called `..._proj` are quantized, except those
    in the modules `kept`. The W4A16 groups are the largest of at most 128 inputs that divide all layers' inputs."""
    if name == CALIBRATED:
        return _calibrated(source, folder, kept)
    scheme = FORMATS[name].model_copy(deep=True)
    layout = infer_module_format(torch.nn.Linear, scheme).value
    tensors = load_file(source / "model.safetensors", device=DEVICE)
    in_kept = tuple(f"{module}." for module in kept)
    quantized = {
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith("_proj.weight") and not name.startswith(in_kept)
    }
    if scheme.weights.strategy == "group":
        scheme.weights.group_size = gcd(128, *(tensors[f"{layer}.weight"].shape[1] for layer in quantized))
    written = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in quantized}
    for layer in sorted(quantized):
        parts = _quantize(tensors[f"{layer}.weight"], scheme, layout, _fused_max(tensors, layer))
        written |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=layout,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", *_patterns(kept)],
    ).model_dump(mode="json", exclude_none=True)
    return save_checkpoint(source, folder, written, {"quantization_config": config})


def _calibrated(source: Path, folder: Path, kept: Sequence[str]) -> Path:
    # Its folder comes first: llm-compressor has another compressed-tensors than vLLM.
    paths = (os.environ["LLM_COMPRESSOR"], os.environ.get("PYTHONPATH", ""))
    script = Path(__file__).with_name("calibrate.py")
    python = os.environ.get("LLM_COMPRESSOR_PYTHON", sys.executable)
    command = [python, script, source, folder, "--ignore", "lm_head", *_patterns(kept)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": ":".join(paths)})
    return folder


def _patterns(modules: Sequence[str]) -> list[str]:
    return [f"re:^{re.escape(module)}(\\..*)?$" for module in modules]


def pad_heads(source: Path, folder: Path, query_heads: int, key_value_heads: int) -> Path:
    """Write `source` with more attention heads, whose weights are all zero: the same function in another shape.

    Tensor parallelism needs a number of heads that the number of devices divides. Whole groups are added after the
    others; their values are zero and so is what the output projection makes of them.

    Raises:
        ValueError: a group would have another number of heads.
    """
    config = json.loads((source / "config.json").read_text())
    old_query, old_key_value = config["num_attention_heads"], config["num_key_value_heads"]
    if query_heads * old_key_value != old_query * key_value_heads:
        raise ValueError(f"{old_query} on {old_key_value} heads cannot grow to {query_heads} on {key_value_heads}")
    head_size = config.get("head_dim") or config["hidden_size"] // old_query
    rows = {"q_proj": query_heads, "k_proj": key_value_heads, "v_proj": key_value_heads}
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if projection in rows:
            more = rows[projection] * head_size - len(weight)
            tensors[name] = torch.nn.functional.pad(weight, (0, 0, 0, more))
        elif projection == "o_proj":
            tensors[name] = torch.nn.functional.pad(weight, (0, query_heads * head_size - weight.shape[1]))
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": key_value_heads, "head_dim": head_size}
    return save_checkpoint(source, folder, tensors, heads)


def save_checkpoint(source: Path, folder: Path, tensors: Tensors, settings: Mapping[str, object]) -> Path:
    """Write `source` with other tensors, and with these settings in config.json."""
    copy_all_but_weights(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | dict(settings)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _fused_max(tensors: Tensors, layer: str) -> torch.Tensor:
    """Largest weight of the layer and of those that vLLM fuses it with."""
    block, _, projection = layer.rpartition(".")
    partners = next((names for names in FUSED if projection in names), (projection,))
    return torch.stack([tensors[f"{block}.{name}.weight"].float().abs().amax() for name in partners]).amax()


def _quantize(weight: torch.Tensor, scheme: QuantizationScheme, layout: str, fused_max: torch.Tensor) -> Tensors:
    """[out, in] -> the tensors that stand for it in the checkpoint."""
    arguments, weight = scheme.weights, weight.float()
    parts = {"weight": weight}
    shared = None
    if arguments.strategy == "tensor_group":
        # Local scales are divided by this: the largest one becomes 448, the largest float8_e4m3fn.
        shared = parts["weight_global_scale"] = generate_gparam(-fused_max, fused_max)
    groups = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
    low, high = groups.aminmax(dim=-1)
    scale, _ = calculate_qparams(low, high, arguments, global_scale=shared)
    if arguments.strategy == "group":
        # Kernels for 16-bit activations hold these scales in 16 bits; weights are rounded with the scale that is kept.
        scale = scale.bfloat16().float()
    compressor = BaseCompressor.get_value_from_registry(layout)
    # Rounding to FP4 is compiled there, anew for each shape, which takes far longer than it saves.
    with torch.compiler.set_stance("force_eager"):
        compressed = compressor.compress(parts | {"weight_scale": scale}, scheme)
    if arguments.strategy == "group":
        compressed["weight_scale"] = compressed["weight_scale"].bfloat16()
    return dict(compressed)
