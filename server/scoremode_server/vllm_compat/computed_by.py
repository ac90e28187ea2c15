"""The runner, kernels and devices that compute a server's numbers: the first worker tells them, and vLLM's
configuration. Readers of a run see them, and nothing depends on them."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.platforms import current_platform

from scoremode.wire.protocol import SATURATES, ComputedBy
from scoremode_server.vllm_compat.engine_client import call_workers

# vLLM shows only the messages of loggers below its own.
logger = init_logger("vllm.scoremode.computed_by")

_RUNNERS = {"vllm.v1.worker.gpu_model_runner": "v1", "vllm.v1.worker.gpu.model_runner": "v2"}
"""By the modules of the classes that they, or those of other platforms, are of."""
_KERNELS = "vllm.model_executor.kernels."
_INT8_ON_CPU = "CPUInt8ScaledMMLinearKernel"


async def what_computes(client: EngineClient) -> ComputedBy:
    """Describe what computes at an engine, in all replicas."""
    config = client.vllm_config
    parallel, drafts = config.parallel_config, config.speculative_config
    described: dict[str, Any] = {}
    try:
        described = next(filter(None, await call_workers(client, "scoremode_computed_by")), {})
    # Such as of workers without our patches: a server without this knowledge is as good.
    except Exception as error:
        logger.warning("What computes is not known: %s", error)
    computed_by = ComputedBy(
        num_devices=parallel.world_size * parallel.data_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        speculative_method="none" if drafts is None else drafts.method,
        **described,
    )
    if computed_by.saturates:
        logger.warning("This CPU has no VNNI, so sums of INT8 products saturate: scores are not those of the model.")
    return computed_by


def describe_worker(wrapper: Any) -> dict[str, Any] | None:
    """A method of vLLM's worker wrappers: fields of `ComputedBy`, and None on all ranks but the first."""
    worker = wrapper.worker
    if worker.rank != 0:
        return None
    runner = worker.model_runner
    modules = [each.__module__ for each in type(runner).__mro__]
    dtype = runner.cache_config.cache_dtype
    return {
        "model_runner": next((version for module, version in _RUNNERS.items() if module in modules), None),
        "attention_backends": sorted(set(_attention_backends(runner.model))),
        "kernels": sorted(set(_kernels(runner.model))),
        "kv_cache_dtype": str(runner.kv_cache_dtype).removeprefix("torch.") if dtype == "auto" else str(dtype),
        "device": current_platform.get_device_name(),
        "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
    }


def _attention_backends(model: torch.nn.Module) -> Iterator[str]:
    for layer in model.modules():
        if hasattr(layer, "get_attn_backend"):
            version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
            yield layer.get_attn_backend().get_name() + (f" {version}" if version else "")


def _kernels(model: torch.nn.Module) -> Iterator[str]:
    for layer in model.modules():
        method, scheme = getattr(layer, "quant_method", None), getattr(layer, "scheme", None)
        if method is not None:
            parts = [scheme, *_parts_of(method), *_parts_of(scheme)]
            names = dict.fromkeys(_name(each) for each in parts if each is not None)
            yield ": ".join(filter(None, [type(method).__name__, ", ".join(names)]))


def _parts_of(owner: Any) -> Iterator[Any]:
    """Find what a quantization method or scheme computes by: objects of vLLM's kernels, a function, the parts of
    MoE."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if name in ("linear_method", "old_quant_method"):
            yield value
            yield from _parts_of(value)
        elif name == "moe_kernel":
            yield from (getattr(value, part, None) for part in ("prepare_finalize", "fused_experts"))
        elif name == "_gemm_impl" or type(value).__module__.startswith(_KERNELS):
            yield value


def _name(part: Any) -> str:
    function = getattr(part, "func", part)
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name} ({SATURATES})" if name == _INT8_ON_CPU and int8_products_saturate() else name


def int8_products_saturate() -> bool:
    """Whether this CPU lacks VNNI: oneDNN, vLLM's INT8 kernel on CPUs, then adds pairs of products in 16 bits.

    oneDNN's documentation tells so under "Nuances of int8 Computations".
    """
    capabilities = torch.cpu.get_capabilities()
    return capabilities["architecture"] == "x86_64" and not (capabilities["avx512_vnni"] or capabilities["avx_vnni"])
