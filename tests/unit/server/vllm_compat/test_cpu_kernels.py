"""INT8 in float32 is refused where vLLM's kernel cannot compute it. What the CPU has is mocked: machines with AMX are
rare, and those without never take that kernel."""

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


def test_float32_is_refused_for_int8_on_a_cpu_with_amx(configured):
    with pytest.raises(SystemExit) as ended:
        configured("float32", INT8, TOKENS, True)
    assert ended.value.code == (
        "scoremode: --dtype float32 does not work with INT8 weights and activations on this CPU, which has AMX: vLLM's "
        "kernel for it takes 16-bit inputs; give --dtype bfloat16, also to the models that this one is compared with"
    )


@pytest.mark.parametrize(
    ("dtype", "weights", "inputs", "has_amx"),
    [
        ("float32", INT8, TOKENS, False),
        ("bfloat16", INT8, TOKENS, True),
        # vLLM has another kernel for activations with a zero point, and for weights alone.
        ("float32", INT8, {**TOKENS, "symmetric": False}, True),
        ("float32", {**INT8, "strategy": "group", "group_size": 32}, None, True),
        ("float32", {**INT8, "type": "float"}, {**TOKENS, "type": "float"}, True),
    ],
)
def test_all_that_has_a_kernel_is_served(configured, dtype, weights, inputs, has_amx):
    assert configured(dtype, weights, inputs, has_amx) == getattr(torch, dtype)
