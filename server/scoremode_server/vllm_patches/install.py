"""Puts every patch in place, in each process that loads plugins."""

from typing import Any

from vllm.distributed import get_tp_group
from vllm.v1.worker.worker_base import WorkerWrapperBase

from scoremode_server.references.directory import ReferenceDirectory
from scoremode_server.settings import logprob_bytes, reference_directory
from scoremode_server.vllm_patches import output_processor
from scoremode_server.vllm_patches.computed_by import describe_worker


def install() -> None:
    """Patch the vLLM of this process; once is enough, and more does no harm.

    The model runners are patched when a worker of this process has its device. API servers load plugins too, and have
    no use for model runners; and some are not importable before the platform is set up.

    Raises:
        ValueError: the working memory for prompt logprobs is set to something else than a positive number of bytes.
    """
    budget = logprob_bytes()
    output_processor.patch()
    if getattr(WorkerWrapperBase, "_scoremode_patched", False):
        return
    init_device = WorkerWrapperBase.init_device

    def init_device_then_patch(self: Any) -> None:
        init_device(self)
        # Ranks of a tensor-parallel group project together, so all of them take the budget of the first.
        patch_runners(get_tp_group().broadcast_object(budget))

    WorkerWrapperBase.init_device = init_device_then_patch
    # Not by the worker extension, which is another's or nobody's where there is no folder for references.
    WorkerWrapperBase.scoremode_computed_by = describe_worker
    WorkerWrapperBase._scoremode_patched = True


def patch_runners(budget_bytes: int) -> None:
    """Patch both model runners, once a process, so that prompt logprobs take at most so much working memory."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from scoremode_server.vllm_patches import runner_v1, runner_v2
    from scoremode_server.vllm_patches.reference_windows import ReferenceWindows
    from scoremode_server.vllm_patches.scored_windows import ScoredWindows

    if getattr(GPUModelRunner, "_scoremode_patched", False):
        return
    root = reference_directory()
    windows = ScoredWindows() if root is None else ReferenceWindows(ReferenceDirectory(root))
    runner_v1.patch(budget_bytes, windows)
    runner_v2.patch(budget_bytes, windows)
    GPUModelRunner._scoremode_patched = True
