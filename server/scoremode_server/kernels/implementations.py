"""Which implementation of the kernels over rows of logits a device gets."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Kernels(NamedTuple):
    """One implementation of what reads logits; `torch_kernels` says what each does."""

    take_targets: Callable[..., None]
    reduce_rows: Callable[..., None]
    sum_divergences: Callable[..., torch.Tensor]


def kernels_for(device: torch.device) -> Kernels:
    """Triton's on a GPU, PyTorch's elsewhere."""
    if device.type == "cuda":
        from scoremode_server.kernels import triton_kernels, triton_kl_divergence

        return Kernels(triton_kernels.take_targets, triton_kernels.reduce_rows, triton_kl_divergence.sum_divergences)
    from scoremode_server.kernels import torch_kernels

    return Kernels(torch_kernels.take_targets, torch_kernels.reduce_rows, torch_kernels.sum_divergences)
