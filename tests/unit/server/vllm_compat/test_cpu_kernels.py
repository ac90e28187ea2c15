"""Quantized weights in float32 are refused where no kernel of vLLM computes them. What the CPU has is mocked: machines
with AMX are rare, and those without never take its kernel."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform

from scoremode_server.cli import serve
from scoremode_server.vllm_compat import cpu_kernels

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKENS = {**INT8, "strategy": "token", "dynamic": True}


@pytest.fixture
def configured(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start `scoremode serve`, up to vLLM's configuration of the engine."""
    from vllm import AsyncEngineArgs

    platform = type(current_platform)
    monkeypatch.setattr(platform, "check_and_update_config", platform.check_and_update_config)
    cpu_kernels.patch()
    folder = models.random_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())

    def start(dtype: str, weights: dict[str, Any], inputs: dict[str, Any] | None, has_amx: bool) -> torch.dtype:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
        form = "pack-quantized" if inputs is None else "int-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        quantization = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        made = []

        def configure(namespace: Any) -> None:
            made.append(AsyncEngineArgs.from_cli_args(namespace).create_engine_config())

        monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(configure))
        serve([str(folder), "--dtype", dtype, "--max-model-len", "64"])
        return made[0].model_config.dtype

    return start


INT4 = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("weights", "inputs", "has_amx", "refused"),
    [
        (INT8, TOKENS, True, "INT8 weights and activations on this CPU, which has AMX"),
        (INT4, None, True, "weights of 4 bits on a CPU"),
        (INT4, None, False, "weights of 4 bits on a CPU"),
    ],
)
def test_float32_is_refused_where_no_kernel_takes_it(configured, weights, inputs, has_amx, refused):
    with pytest.raises(SystemExit) as ended:
        configured("float32", weights, inputs, has_amx)
    assert ended.value.code == (
        f"scoremode: --dtype float32 does not work with {refused}: vLLM's kernel for it takes 16-bit inputs; give "
        "--dtype bfloat16, also to the models that this one is compared with"
    )


@pytest.mark.parametrize(
    ("dtype", "weights", "inputs", "has_amx"),
    [
        ("float32", INT8, TOKENS, False),
        ("bfloat16", INT8, TOKENS, True),
        ("bfloat16", INT4, None, False),
        # vLLM has another kernel for activations with a zero point, and for weights alone.
        ("float32", INT8, {**TOKENS, "symmetric": False}, True),
        ("float32", {**INT8, "strategy": "group", "group_size": 32}, None, True),
        ("float32", {**INT8, "type": "float"}, {**TOKENS, "type": "float"}, True),
    ],
)
def test_all_that_has_a_kernel_is_served(configured, dtype, weights, inputs, has_amx):
    assert configured(dtype, weights, inputs, has_amx) == getattr(torch, dtype)
