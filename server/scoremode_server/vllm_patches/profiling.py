"""Work of the largest kind added to the dummy run by which vLLM finds out how much memory a step takes."""

from collections.abc import Callable
from typing import Any

import torch

from scoremode_server.kernels.working_memory import LogitsShape


def add_to_profile(runner_class: Any, reserve: Callable[[Any, torch.Tensor], None]) -> None:
    """Let `reserve(runner, hidden states of the sampled rows)` run after the sampler's dummy run.

    vLLM makes that run while it profiles, on the last pipeline rank and for models that generate, and holds the hidden
    states of a full batch meanwhile, as it does in a real step. The V1 runner repeats it after capturing CUDA graphs,
    so that its allocator already owns the memory.
    """
    dummy_sampler_run = runner_class._dummy_sampler_run

    @torch.inference_mode()
    def dummy_sampler_run_then_reserve(self: Any, hidden_states: torch.Tensor) -> Any:
        output = dummy_sampler_run(self, hidden_states)
        if not self.vllm_config.is_mm_encoder_only:
            reserve(self, hidden_states)
        return output

    runner_class._dummy_sampler_run = dummy_sampler_run_then_reserve


def logits_shape(runner: Any) -> LogitsShape:
    """Of the model that a runner has loaded."""
    config = runner.model_config
    return LogitsShape(config.get_vocab_size(), config.head_dtype.itemsize, runner.parallel_config.tensor_parallel_size)
