"""Describes the runner, kernels and devices that compute a server's numbers, as the first worker and vLLM's
configuration report them. Readers of a measurement see the description; no result depends on it."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm import envs
from vllm.distributed import get_pp_group, get_tp_group
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform

from scoremode.wire.protocol import SATURATES, ComputedBy
from scoremode_server.vllm_compat.engine_client import call_workers
from scoremode_server.worker.lm_head import examine, wrong_logits

# vLLM prints the messages of loggers below its own.
logger = init_logger("vllm.scoremode.computed_by")

_RUNNERS = {"vllm.v1.worker.gpu_model_runner": "v1", "vllm.v1.worker.gpu.model_runner": "v2"}
"""Names of the model runners, by the module of a runner's class or of one of its base classes."""
_KERNELS = "vllm.model_executor.kernels."
_TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers"
"""The module of vLLM's classes that run models of the transformers library (`--model-impl transformers`)."""
_INT8_ON_CPU = "CPUInt8ScaledMMLinearKernel"


async def what_computes(client: EngineClient) -> ComputedBy:
    """Describe the devices, kernels and parallelism that compute an engine's numbers, over all its replicas."""
    config = client.vllm_config
    parallel, drafts = config.parallel_config, config.speculative_config
    described: dict[str, Any] = {}
    try:
        # The first rank describes everything but the logits, which a pipeline's last ranks compute.
        for answer in filter(None, await call_workers(client, "scoremode_computed_by")):
            described = answer | described
    # Workers may lack our patches, for example. The server works without the description.
    except Exception as error:
        logger.warning("The kernels of this server are not known: %s", error)
    computed_by = ComputedBy(
        num_devices=parallel.world_size * parallel.data_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        speculative_method="none" if drafts is None else drafts.method,
        **described,
    )
    if computed_by.fault:
        logger.warning("Do not trust the figures of this server: %s.", computed_by.fault)
    return computed_by


def describe_worker(wrapper: Any) -> dict[str, Any] | None:
    """Describe a worker. This becomes a method of vLLM's worker wrappers, which all ranks call at the same time. The
    first rank returns fields of `ComputedBy`; other ranks return only what is wrong with their logits, or None."""
    worker = wrapper.worker
    runner = worker.model_runner
    logits = _logits(runner)
    if worker.rank != 0:
        return logits or None
    modules = [cls.__module__ for cls in type(runner).__mro__]
    dtype = runner.cache_config.cache_dtype
    is_eager, compilation = runner.model_config.enforce_eager, runner.compilation_config
    modes = {"cuda_graphs": compilation.cudagraph_mode.name, "compilation": compilation.mode.name}
    return {
        "implementation": _implementation(runner.model),
        "model_runner": next((version for module, version in _RUNNERS.items() if module in modules), None),
        "attention_backends": sorted(set(_attention_backends(runner.model))),
        "kernels": sorted(set(_kernels(runner.model))),
        "kv_cache_dtype": str(runner.kv_cache_dtype).removeprefix("torch.") if dtype == "auto" else str(dtype),
        "device": current_platform.get_device_name(),
        "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
        "eager": is_eager,
        **({} if is_eager else modes),
        **logits,
    }


def _implementation(model: torch.nn.Module) -> str:
    """`transformers` where vLLM runs the transformers library's model, or a part of it; `vllm` for vLLM's own classes;
    else the package of the model's class."""
    modules = [type(part).__module__ for part in model.modules()]
    if any(f"{module}.".startswith(f"{_TRANSFORMERS_BACKEND}.") for module in modules):
        return "transformers"
    return modules[0].partition(".")[0]


@torch.inference_mode()
def _logits(runner: Any) -> dict[str, str]:
    """The field `wrong_logits` of `ComputedBy`, if this rank computes logits and they are wrong."""
    has_processor = any(type(part) is LogitsProcessor for part in runner.model.modules())
    if not has_processor or not get_pp_group().is_last_rank:
        return {}
    config = runner.model_config
    source = examine(runner.model.compute_logits, config.get_hidden_size(), config.dtype, get_tp_group()).source
    fault = source and wrong_logits(source, config.hf_text_config)
    return {"wrong_logits": fault} if fault else {}


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
            names = dict.fromkeys(_name(part) for part in parts if part is not None)
            yield ": ".join(filter(None, [type(method).__name__, ", ".join(names)]))


def _parts_of(owner: Any) -> Iterator[Any]:
    """Find the parts with which a quantization method or scheme computes: vLLM's kernel objects, a function, the parts
    of an MoE kernel."""
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
    """Whether this is an x86 CPU without VNNI. There oneDNN, which vLLM's INT8 kernel on CPUs uses, adds pairs of
    products in 16 bits, which may overflow.

    oneDNN's documentation explains this under "Nuances of int8 Computations".
    """
    capabilities = torch.cpu.get_capabilities()
    return capabilities["architecture"] == "x86_64" and not (capabilities["avx512_vnni"] or capabilities["avx_vnni"])
