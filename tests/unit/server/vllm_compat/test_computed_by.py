"""The description of what computes is read from a worker's modules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig

from scoremode.wire.protocol import ComputedBy
from scoremode_server.vllm_compat import computed_by
from scoremode_server.vllm_compat.computed_by import _implementation, describe_worker, what_computes


def made(name: str, module: str = "vllm.model_executor.layers", **attributes: Any) -> Any:
    """An object of a class of that name, which is in that module."""
    found = type(name, (), {"__module__": module})()
    vars(found).update(attributes)
    return found


class Layer(torch.nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


def attention(name: str, **impl: Any) -> Layer:
    return Layer(impl=SimpleNamespace(**impl), get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))


def default_unquantized_gemm() -> None: ...


def test_kernels_are_those_of_every_kind_of_layer_once():
    machete = made("MacheteLinearKernel", "vllm.model_executor.kernels.linear.mixed_precision.machete")
    experts = SimpleNamespace(prepare_finalize=made("NoDPEP"), fused_experts=made("TritonExperts"))
    layers = [
        Layer(quant_method=made("UnquantizedLinearMethod", _gemm_impl=default_unquantized_gemm)),
        *(Layer(quant_method=made("CTLinearMethod"), scheme=made("W4A16", kernel=machete)) for _ in range(2)),
        Layer(quant_method=made("ModularMethod", moe_kernel=experts, old_quant_method=made("Fp8MoEMethod"))),
        Layer(quant_method=None),
        attention("FLASH_ATTN", vllm_flash_attn_version=3),
        *(attention("GDN_ATTN") for _ in range(2)),
    ]
    runner = made(
        "GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner",
        model=torch.nn.Sequential(*layers),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=CompilationConfig(mode=3, cudagraph_mode="FULL_AND_PIECEWISE"),
    )
    worker = SimpleNamespace(model_runner=runner, rank=0)
    described = describe_worker(SimpleNamespace(worker=worker))
    assert described["kernels"] == [
        "CTLinearMethod: W4A16, MacheteLinearKernel",
        "ModularMethod: NoDPEP, TritonExperts, Fp8MoEMethod",
        "UnquantizedLinearMethod: default_unquantized_gemm",
    ]
    assert described["attention_backends"] == ["FLASH_ATTN 3", "GDN_ATTN"]
    assert (described["model_runner"], described["kv_cache_dtype"]) == ("v2", "bfloat16")
    modes = {"eager": False, "cuda_graphs": "FULL_AND_PIECEWISE", "compilation": "VLLM_COMPILE"}
    assert {name: described[name] for name in modes} == modes
    runner.model_config.enforce_eager = True
    eager = describe_worker(SimpleNamespace(worker=worker))
    assert (eager["eager"], described.keys() - eager.keys()) == (True, {"cuda_graphs", "compilation"})


@pytest.mark.parametrize(
    ("modules", "implementation"),
    [
        (["vllm.model_executor.models.granite"], "vllm"),
        (["vllm.model_executor.models.transformers"], "transformers"),
        # A model of vLLM's with images, whose language model is the backend's.
        (["vllm.model_executor.models.llava", "vllm.model_executor.models.transformers.causal"], "transformers"),
        (["vllm.model_executor.models.transformers_like"], "vllm"),
        (["their_models.granite"], "their_models"),
    ],
)
def test_the_implementation_is_that_of_the_loaded_classes(modules, implementation):
    outer, *inner = (type("Model", (torch.nn.Module,), {"__module__": module})() for module in modules)
    for part in inner:
        outer.add_module("language_model", part)
    assert _implementation(outer) == implementation


def test_other_ranks_say_nothing():
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert describe_worker(SimpleNamespace(worker=SimpleNamespace(rank=1, model_runner=runner))) is None


def engine_client(answers: list[list[Any]] | None, method: str | None, **parallel: Any) -> Any:
    """A client whose workers answer so, or do not know the call."""

    async def call(*arguments: Any) -> list[list[Any]]:
        if answers is None:
            raise NotImplementedError("no such method")
        return answers

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), speculative_config=method and SimpleNamespace(method=method)
    )
    return SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(call_utility_all_async=call))


async def test_the_logits_of_a_pipelines_last_rank_are_described_and_logged(monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(computed_by.logger, "warning", lambda text, *values: warnings.append(text % values))
    sizes = {"world_size": 2, "data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    answers = [[{"device": "cpu"}, {"wrong_logits": "no scale"}]]
    found = await what_computes(engine_client(answers, None, **sizes, enable_expert_parallel=False))
    assert (found.device, found.wrong_logits) == ("cpu", "no scale")
    assert warnings == ["Do not trust the figures of this server: scores are not those of the model: no scale."]


async def test_a_server_without_patched_workers_knows_its_configuration():
    sizes = {"data_parallel_size": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    found = await what_computes(engine_client(None, "eagle", world_size=2, enable_expert_parallel=True, **sizes))
    assert found == ComputedBy(num_devices=8, **sizes, expert_parallel=True, speculative_method="eagle")
