"""Applies the patches that every process of vLLM needs. Those of the API server are applied in `plugin.py` and
`app.py`."""

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
    """Patch vLLM in this process. Further calls do nothing. The model runners are patched when a worker of this process
    has its device, because some of their modules cannot be imported earlier. `on_worker_start` is called then, and
    returns the `SinkMaker` of each kind of sink, by name. ValueError if the memory setting is not a number of
    bytes."""
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
        # Ranks of a tensor-parallel group compute logits together, chunk by chunk, so all use the first rank's budget.
        patch_runners(get_tp_group().broadcast_object(budget), on_worker_start())

    WorkerWrapperBase.init_device = init_device_then_patch
    # Patched here because the worker extension is only loaded with --reference-dir.
    WorkerWrapperBase.scoremode_computed_by = describe_worker
    WorkerWrapperBase._scoremode_patched = True


def patch_runners(budget_bytes: int, sinks: Mapping[str, SinkMaker]) -> None:
    """Patch both model runners, once per process. Prompt logprobs get `budget_bytes` of working memory."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from scoremode_server.worker import runners

    if getattr(GPUModelRunner, "_scoremode_patched", False):
        return
    refuse_adapters_of_heads()
    runners.patch_v1(budget_bytes, sinks)
    runners.patch_v2(budget_bytes, sinks)
    GPUModelRunner._scoremode_patched = True


def refuse_adapters_of_heads() -> None:
    """Refuse LoRA adapters with weights for the LM head when they are loaded. vLLM finds a row's adapter by the row's
    index among sampled rows. Rows of prompt logprobs have other indices, so they would get other requests' adapters."""
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

    set_lora = LogitsProcessorWithLoRA.set_lora

    def set_lora_of_zeros(self: Any, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        # vLLM warms up with adapters of zeros for every layer.
        if lora_b.any():
            raise ValueError(
                "this adapter has weights for the LM head, and vLLM would compute prompt logprobs with the weights of "
                "other adapters; merge it into the model, or serve it without Scoremode"
            )
        set_lora(self, index, lora_a, lora_b)

    LogitsProcessorWithLoRA.set_lora = set_lora_of_zeros
