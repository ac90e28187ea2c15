"""Refuses models that vLLM loads on a CPU but cannot compute there. The check runs while vLLM makes its configuration,
before it loads a model."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from scoremode_server.errors import NoKernelError


def patch() -> None:
    """Add our check to those of vLLM's platform, if that is a CPU."""
    platform = type(current_platform)
    if not current_platform.is_cpu():
        return
    check = platform.check_and_update_config

    def check_kernels_too(cls: type, config: VllmConfig) -> None:
        check(config)
        require_kernels(config)

    platform.check_and_update_config = classmethod(check_kernels_too)


def require_kernels(config: VllmConfig) -> None:
    """NoKernelError for float32 with 4-bit weights, and on a CPU with AMX also for float32 with symmetric INT8 weights
    and activations. vLLM has kernels that take float32 for all other schemes."""
    schemes = getattr(config.quant_config, "target_scheme_map", {}).values()
    if not schemes or config.model_config.dtype != torch.float32:
        return
    if any(map(_has_4_bit_weights, schemes)):
        refused = "weights of 4 bits on a CPU"
    elif any(map(_is_symmetric_int8, schemes)) and torch.cpu._is_amx_tile_supported():
        refused = "INT8 weights and activations on this CPU, which has AMX"
    else:
        return
    raise NoKernelError(
        f"--dtype float32 does not work with {refused}: vLLM's kernel for it takes 16-bit inputs; give --dtype "
        "bfloat16, also to the models that this one is compared with"
    )


def _has_4_bit_weights(scheme: Any) -> bool:
    """Whether a scheme of compressed-tensors, a dict, has 4-bit weights and no quantized activations."""
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    return weights is not None and inputs is None and (weights.num_bits, weights.type) == (4, "int")


def _is_symmetric_int8(scheme: Any) -> bool:
    """Whether a scheme has INT8 weights and symmetric INT8 activations."""
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    if weights is None or inputs is None:
        return False
    return inputs.symmetric and all((part.num_bits, part.type) == (8, "int") for part in (weights, inputs))
