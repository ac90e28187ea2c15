"""The kernel paths that vLLM itself says it has for a model: of the installed CPU build, and of an H200, as the classes
for CUDA answer without one."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import vllm as vllm_config
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms.interface import DeviceCapability

from scoremode_server.cli import parse
from scoremode_server.vllm_compat import paths
from scoremode_server.vllm_compat.paths import VARIED, candidates

W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4}},
}
Found = dict[str, list[str]]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}


@pytest.fixture
def model(random_model: Path, tmp_path: Path) -> Path:
    """A model of two heads, without its weights, which nothing reads."""
    for file in random_model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """vLLM's platform for CUDA, which finds four H200 GPUs and Triton; call it for GPUs of another capability."""
    if importlib.util.find_spec("vllm._C_stable_libtorch") is None:
        monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("compiled"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform

    def set_capability(major: int, minor: int) -> None:
        capability = DeviceCapability(major, minor)
        monkeypatch.setattr(Platform, "get_device_capability", classmethod(lambda cls, device_id=0: capability))

    set_capability(9, 0)
    monkeypatch.setattr(Platform, "device_count", classmethod(lambda cls: 4))
    monkeypatch.setattr(paths, "current_platform", Platform())
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)
    return set_capability


def found(
    model: Path, arguments: str = "", variables: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> Found:
    """The values of each flag and environment variable, for a model with changes of its configuration."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    values: Found = {}
    with patch.dict(os.environ, variables):
        for path in candidates(parse(ServeSubcommand(), [str(model), *arguments.split()], **dict.fromkeys(VARIED))):
            name, *rest = path["flags"] or [*path["env"].keys(), *path["env"].values()]
            values.setdefault(name, []).extend(rest)
        assert not os.environ.keys() & {"VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"} - variables.keys()
    return values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"--kv-cache-dtype": ["fp8", "fp8_e5m2"], "--enforce-eager": []}),
        ("--kv-cache-dtype auto", {"--enforce-eager": []}),
        ("--enforce-eager --kv-cache-dtype fp8", {}),
        # vLLM runs eagerly as it is.
        ("-O0", {"--kv-cache-dtype": ["fp8", "fp8_e5m2"]}),
    ],
)
def test_a_cpu_has_few_paths_and_what_is_given_is_not_varied(model, arguments, expected):
    assert found(model, arguments) == expected


def test_an_h200_has_the_backends_that_vllm_has_for_it_but_the_usual_ones(model, h200):
    paths_of = found(model)
    dtypes = {*paths_of.pop("--kv-cache-dtype")}
    assert paths_of == {
        "--attention-backend": ["TRITON_ATTN", "FLEX_ATTENTION"],
        "--enforce-eager": [],
        "VLLM_USE_V2_MODEL_RUNNER": ["0"],
        "VLLM_BATCH_INVARIANT": ["1"],
        # Two heads cannot be divided among four GPUs.
        "--tensor-parallel-size": ["2"],
    }
    assert dtypes > {"fp8", "fp8_e5m2", "turboquant_k8v4"}
    # The model's dtype, another name of fp8, those that do not fit the model's dtype or attention.
    assert not dtypes & {"auto", "bfloat16", "fp8_e4m3", "float16", "fp8_ds_mla", "nvfp4"}
    given = found(model, "--attention-backend TRITON_ATTN --tensor-parallel-size 1", {"VLLM_BATCH_INVARIANT": "0"})
    assert given.keys() == {"--kv-cache-dtype", "--enforce-eager", "VLLM_USE_V2_MODEL_RUNNER"}


def test_kernels_of_linear_layers_are_those_that_the_gpu_can_run(model, h200):
    hopper = {*found(model, quantization_config=QUANTIZED)["--linear-backend"]}
    assert hopper > {"marlin", "machete", "triton"}
    assert not hopper & {"auto", "xpu", "aiter", "fbgemm"}
    h200(8, 0)
    assert hopper - {*found(model)["--linear-backend"]} == {"machete", "cutlass"}


def test_a_checkpoint_with_a_cache_of_8_bits_has_the_path_of_16_bits(model, h200):
    dtypes = found(model, quantization_config={**QUANTIZED, "kv_cache_scheme": FP8})["--kv-cache-dtype"]
    assert "bfloat16" in dtypes
    assert "fp8" not in dtypes


def test_experts_have_backends_and_a_model_without_attention_none(model, h200):
    mamba = found(model, architectures=["MambaForCausalLM"], model_type="mamba", state_size=16)
    assert not mamba.keys() & {"--attention-backend", "--kv-cache-dtype", "--moe-backend"}
    mixtral = found(model, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4)
    assert {*mixtral["--moe-backend"]} > {"triton", "marlin"}
    # vLLM's configuration refuses the second for this model.
    assert not {*mixtral["--moe-backend"]} & {"auto", "flashinfer_moe_ep_mega_deep_gemm"}
