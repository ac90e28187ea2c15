"""What computes a server's numbers besides the weights: asked of the first worker, and read of vLLM's configuration.

Readers of a run see it, and nothing depends on it: fields that this vLLM does not have are None.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.platforms import current_platform

from scoremode.wire.protocol import ComputedBy
from scoremode_server.vllm_patches.worker_extension import call_workers

# vLLM shows only the messages of loggers below its own.
logger = init_logger("vllm.scoremode.computed_by")

_RUNNERS = {"vllm.v1.worker.gpu_model_runner": "v1", "vllm.v1.worker.gpu.model_runner": "v2"}
"""By the modules of the classes that they, or those of other platforms, are of."""
_KERNELS = "vllm.model_executor.kernels."


async def what_computes(client: EngineClient) -> ComputedBy:
    """What computes at an engine, all replicas together."""
    config: Any = client.vllm_config
    parallel, drafts = config.parallel_config, config.speculative_config
    found = _known(
        num_devices=lambda: parallel.world_size * parallel.data_parallel_size,
        tensor_parallel_size=lambda: parallel.tensor_parallel_size,
        pipeline_parallel_size=lambda: parallel.pipeline_parallel_size,
        data_parallel_size=lambda: parallel.data_parallel_size,
        expert_parallel=lambda: parallel.enable_expert_parallel,
        speculative_method=lambda: "none" if drafts is None else drafts.method,
    )
    try:
        for described in filter(None, await call_workers(client, "scoremode_computed_by")):
            found = {**described, **found}
    # Such as of workers without our patches: a server without this knowledge is as good.
    except Exception as error:
        logger.warning("What computes is not known: %s", error)
    return ComputedBy(**found)


def describe_worker(wrapper: Any) -> dict[str, Any] | None:
    """A method of vLLM's worker wrappers: fields of `ComputedBy`, and None on all ranks but the first."""
    worker = wrapper.worker
    if getattr(worker, "rank", 0) != 0:
        return None
    runner: Any = getattr(worker, "model_runner", None)
    modules = [each.__module__ for each in type(runner).__mro__]
    return _known(
        model_runner=lambda: next((version for module, version in _RUNNERS.items() if module in modules), None),
        attention_backends=lambda: sorted(set(_attention_backends(runner.model))),
        kernels=lambda: sorted(set(_kernels(runner.model))),
        kv_cache_dtype=lambda: _kv_cache_dtype(runner),
        device=lambda: current_platform.get_device_name(),
        batch_invariant=lambda: bool(envs.VLLM_BATCH_INVARIANT),
    )


def _known(**fields: Callable[[], Any]) -> dict[str, Any]:
    """Those that can be read."""
    found = {}
    for name, read in fields.items():
        # What a version of vLLM without an attribute raises is without end.
        with suppress(Exception):
            found[name] = read()
    return found


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
    """What a quantization method or scheme computes by: objects of vLLM's kernels, a function, the parts of MoE."""
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
    return str(getattr(function, "__name__", type(function).__name__))


def _kv_cache_dtype(runner: Any) -> str:
    dtype = runner.cache_config.cache_dtype
    return str(runner.kv_cache_dtype).removeprefix("torch.") if dtype == "auto" else str(dtype)
