"""Lists the kernel paths on which the installed vLLM can serve a model here, by asking vLLM's platform, registries and
configuration. It loads no weights."""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, get_args

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.config.kernel import LinearBackend, MoEBackend
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import _LINEAR_BACKEND_KERNEL_MAP
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.scoremode.paths")

VARIED = (
    "attention_backend",
    "linear_backend",
    "moe_backend",
    "kv_cache_dtype",
    "enforce_eager",
    "tensor_parallel_size",
)
"""Options of `vllm serve` that are varied, as argparse names them."""


class Candidate(TypedDict):
    """The flags and environment variables that a server needs, in addition to its own, to take a path."""

    flags: list[str]
    env: dict[str, str]


def candidates(arguments: Namespace) -> list[Candidate]:
    """List the paths that differ in one thing from how a server with these arguments computes. An argument in `VARIED`
    that is None was not given: only these arguments are varied, and environment variables that are not set."""
    given = {name: value for name, value in vars(arguments).items() if name not in VARIED or value is not None}
    config = _config(given)
    paths = [_path(config)]
    found: list[Candidate] = []
    environment = dict(os.environ)
    for name, value in _choices(config):
        if name in given or name in environment:
            continue
        is_flag = name in VARIED
        if not is_flag:
            os.environ[name] = value
        try:
            path = _path(_config(given | {name: value} if is_flag else given))
        # vLLM refuses with errors of many types.
        except Exception as error:
            logger.info("vLLM refuses %s %s: %s", name, value, " ".join(str(error).split()))
            continue
        finally:
            # vLLM's configuration sets variables too.
            os.environ.clear()
            os.environ.update(environment)
        if path not in paths:
            paths.append(path)
            flags = [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
            found.append({"flags": flags, "env": {}} if is_flag else {"flags": [], "env": {name: value}})
    return found


def _config(arguments: Mapping[str, Any]) -> VllmConfig:
    config = AsyncEngineArgs.from_cli_args(Namespace(**arguments)).create_engine_config()
    # vLLM's layers do this later, for a checkpoint of compressed-tensors.
    if config.cache_config.cache_dtype == "auto" and getattr(config.quant_config, "kv_cache_scheme", None) is not None:
        config.cache_config.cache_dtype = "fp8"
    return config


def _choices(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name of an option or an environment variable, value). Defaults and values that vLLM refuses are among
    them."""
    model, parallel = config.model_config, config.parallel_config
    # On a CPU vLLM has one kind of attention and of experts, whatever these flags say, and no batch invariance.
    is_cuda = current_platform.is_cuda()
    if is_cuda and not model.is_attention_free:
        backends, _ = current_platform.get_valid_backends(
            device_capability=current_platform.get_device_capability(),
            attn_selector_config=_selector(config),
            num_heads=model.get_num_attention_heads(parallel),
        )
        yield from (("attention_backend", candidate.backend.name) for candidate in backends)
    yield from (("linear_backend", name) for name in get_args(LinearBackend) if _has_linear_kernel(name, model))
    if is_cuda and model.is_moe:
        yield from (("moe_backend", name) for name in get_args(MoEBackend))
    if not model.is_attention_free:
        yield from (("kv_cache_dtype", name) for name in get_args(CacheDType))
    yield "enforce_eager", True
    yield from (("VLLM_USE_V2_MODEL_RUNNER", value) for value in ("0", "1"))
    if is_cuda:
        yield "VLLM_BATCH_INVARIANT", "1"
    num_devices = current_platform.device_count() // (parallel.pipeline_parallel_size * parallel.data_parallel_size)
    yield from (("tensor_parallel_size", 2**power) for power in range(1, num_devices.bit_length()))


def _path(config: VllmConfig) -> tuple[object, ...]:
    """Describe how a server with this configuration computes, as far as it is known before weights are loaded.
    ValueError if no attention backend takes its KV cache."""
    model, compilation, kernels = config.model_config, config.compilation_config, config.kernel_config
    usual, dtype = str(model.dtype).removeprefix("torch."), config.cache_config.cache_dtype
    attention = None
    if not model.is_attention_free:
        attention = resolve_obj_by_qualname(
            current_platform.get_attn_backend_cls(
                config.attention_config.backend,
                _selector(config),
                model.get_num_attention_heads(config.parallel_config),
            )
        )
        # vLLM 0.32 checks neither before the engine runs: the first on a CPU, the second anywhere.
        if not attention.supports_kv_cache_dtype(dtype) or dtype in {"float16", "bfloat16"} - {usual}:
            raise ValueError(f"{attention.get_name()} takes no such KV cache with {usual}")
    return (
        attention,
        # vLLM has two names for fp8.
        usual if dtype == "auto" else dtype.removesuffix("_e4m3"),
        kernels.linear_backend,
        kernels.moe_backend,
        compilation.mode,
        compilation.cudagraph_mode,
        config.use_v2_model_runner,
        envs.VLLM_BATCH_INVARIANT,
        config.parallel_config.tensor_parallel_size,
    )


def _selector(config: VllmConfig) -> AttentionSelectorConfig:
    """Describe the model's attention as its layers will, except for attention sinks, which only the layers know."""
    model, cache = config.model_config, config.cache_config
    return AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        use_mla=model.use_mla,
        use_sparse=hasattr(model.hf_text_config, "index_topk"),
        use_mm_prefix=model.is_mm_prefix_lm,
        has_sliding_window=model.get_sliding_window() is not None,
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        use_rswa=model.rswa_window is not None,
    )


def _has_linear_kernel(name: str, model: Any) -> bool:
    """Whether a linear backend has a kernel that this device can run; vLLM ignores other values. Only layers know which
    kernels take the model's quantization."""
    if dispatch_unquantized_gemm(name) is not dispatch_unquantized_gemm():
        return True
    kernels = _LINEAR_BACKEND_KERNEL_MAP.get(name, ()) if model.quantization is not None else ()
    return any(
        kernel.is_supported()[0]
        if hasattr(kernel, "is_supported")
        else current_platform.has_device_capability(kernel.get_min_capability())
        for kernel in kernels
    )
