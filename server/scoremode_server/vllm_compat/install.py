"""Puts every patch in place, in each process that loads plugins."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.worker_base import WorkerWrapperBase

from scoremode_server.settings import logprob_bytes
from scoremode_server.vllm_compat import cpu_kernels, engine_errors, output_processor, processes, scheduler
from scoremode_server.vllm_compat.computed_by import describe_worker
from scoremode_server.worker.sinks import SinkMaker


def install(on_worker_start: Callable[[], Mapping[str, SinkMaker]]) -> None:
    """Patch the vLLM of this process; once is enough, and more does no harm. The model runners are patched when a
    worker of this process has its device: some are not importable before. `on_worker_start` is called then, and returns
    what makes the row sinks of extensions, by name. ValueError if the setting of memory is not a number of bytes."""
    budget = logprob_bytes()
    if getattr(WorkerWrapperBase, "_scoremode_patched", False):
        return
    processes.patch()
    cpu_kernels.patch()
    engine_errors.patch()
    output_processor.patch()
    scheduler.patch()
    init_device = WorkerWrapperBase.init_device

    def init_device_then_patch(self: Any) -> None:
        init_device(self)
        # Ranks of a tensor-parallel group project together, so all of them take the budget of the first.
        patch_runners(get_tp_group().broadcast_object(budget), on_worker_start())

    WorkerWrapperBase.init_device = init_device_then_patch
    # Not in the worker extension: without a folder for references the server has another one, or none.
    WorkerWrapperBase.scoremode_computed_by = describe_worker
    WorkerWrapperBase._scoremode_patched = True


def patch_runners(budget_bytes: int, sinks: Mapping[str, SinkMaker]) -> None:
    """Patch both model runners, once a process, with working memory for prompt logprobs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from scoremode_server.worker import runners

    if getattr(GPUModelRunner, "_scoremode_patched", False):
        return
    refuse_adapters_of_heads()
    runners.patch_v1(budget_bytes, sinks)
    runners.patch_v2(budget_bytes, sinks)
    GPUModelRunner._scoremode_patched = True


def refuse_adapters_of_heads() -> None:
    """Refuse LoRA adapters with weights for the LM head when they are loaded. vLLM takes a row's adapter by its number
    among the sampled rows, and rows of prompt logprobs have other numbers: they would get those of other requests."""
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

    set_lora = LogitsProcessorWithLoRA.set_lora

    def set_lora_of_zeros(self: Any, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        # vLLM warms up with adapters of zeros for every layer.
        if lora_b.any():
            raise ValueError(
                "this adapter has weights for the LM head, with which vLLM would make prompt logprobs of other "
                "adapters' logits; merge it into the model, or serve it without Scoremode"
            )
        set_lora(self, index, lora_a, lora_b)

    LogitsProcessorWithLoRA.set_lora = set_lora_of_zeros
