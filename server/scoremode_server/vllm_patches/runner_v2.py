"""vLLM's V2 model runner, patched: prompt logprobs in chunks that fit a budget, and from one pass over their logits."""

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.working_memory import (
    RESERVED_TOP,
    LogitsShape,
    row_bytes_fused,
    row_bytes_v2,
    rows_per_chunk,
)
from scoremode_server.vllm_patches.lm_head import LMHead, LogitsFunction, examine
from scoremode_server.vllm_patches.profiling import add_to_profile, dummy_rows, logits_shape

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [rows, top + 1], ranks [rows]."""


class PromptLogprobs:
    """What takes the place of vLLM's function: its parameters, smaller integers.

    vLLM's own, which takes logits modes and more likeliest tokens than `fused_logprobs` can, works within the budget as
    its chunks are set to.
    """

    def __init__(self, budget_bytes: int, stock: Any) -> None:
        self._budget_bytes = budget_bytes
        self._stock = stock
        self._shape: LogitsShape | None = None
        self._head: LMHead | None = None

    def load(self, shape: LogitsShape) -> int:
        """Take a model that was just loaded; its `compute_logits` is examined when it is first used, which is while
        vLLM profiles. Returns the rows of vLLM's own chunks."""
        self._shape, self._head = shape, None
        return rows_per_chunk(self._budget_bytes, row_bytes_v2(shape))

    def prepare(self, logits_fn: LogitsFunction, hidden_states: torch.Tensor, num_top: int) -> tuple[LMHead, int]:
        """How to project, and rows of a chunk. Ranks of a tensor-parallel group must come here at the same time."""
        assert self._shape is not None
        if self._head is None:
            self._head = examine(logits_fn, hidden_states.shape[-1], hidden_states.dtype, get_tp_group())
        row_bytes = row_bytes_fused(self._shape, num_top, self._head.copies, self._head.shard is not None)
        return self._head, rows_per_chunk(self._budget_bytes, row_bytes)

    def __call__(
        self,
        prompt_token_ids: torch.Tensor,
        prompt_hidden_states: torch.Tensor,
        logits_fn: LogitsFunction,
        num_prompt_logprobs: int,
        logprobs_mode: str = "raw_logprobs",
    ) -> Scores:
        fused = logprobs_mode.endswith("_logprobs") and 0 <= num_prompt_logprobs <= fused_logprobs.MAX_TOP
        if not fused:
            scores: Scores = self._stock(
                prompt_token_ids, prompt_hidden_states, logits_fn, num_prompt_logprobs, logprobs_mode
            )
            return scores
        head, limit = self.prepare(logits_fn, prompt_hidden_states, num_prompt_logprobs)
        return fused_logprobs.compute(
            prompt_token_ids, prompt_hidden_states, head.project, num_prompt_logprobs, limit, head.shard
        )


def patch(budget_bytes: int) -> None:
    """Patch the V2 model runner."""
    compute = PromptLogprobs(budget_bytes, prompt_logprob.compute_prompt_logprobs_with_chunking)
    load_model = GPUModelRunner.load_model

    def load_model_then_set_rows(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        prompt_logprob.CHUNK_SIZE = compute.load(logits_shape(self))

    GPUModelRunner.load_model = load_model_then_set_rows
    prompt_logprob.compute_prompt_logprobs_with_chunking = compute
    add_to_profile(GPUModelRunner, lambda runner, hidden_states: _reserve(runner, hidden_states, compute))


def _reserve(runner: Any, hidden_states: torch.Tensor, compute: PromptLogprobs) -> None:
    # Chunks have more rows where fewer tokens of a row are wanted; either can be the larger.
    logits_fn, mode = runner.model.compute_logits, runner.model_config.logprobs_mode
    for num_top in (0, RESERVED_TOP):
        _, limit = compute.prepare(logits_fn, hidden_states, num_top)
        states, targets = dummy_rows(hidden_states, min(limit, runner.max_num_tokens))
        compute(targets, states, logits_fn, num_top, mode)
