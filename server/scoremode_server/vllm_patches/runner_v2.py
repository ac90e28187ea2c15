"""vLLM's V2 model runner, patched: prompt logprobs in chunks that fit a budget, and from one pass over their logits."""

from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.working_memory import (
    RESERVED_TOP,
    RESULT_BYTES,
    LogitsShape,
    row_bytes_compared,
    row_bytes_fused,
    row_bytes_v2,
    rows_per_chunk,
)
from scoremode_server.vllm_patches.lm_head import LMHead, LogitsFunction, examine
from scoremode_server.vllm_patches.profiling import add_to_profile, dummy_rows, logits_shape
from scoremode_server.vllm_patches.scored_windows import ScoredWindows
from scoremode_server.vllm_patches.windows import Projections

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [rows, top + 1], ranks [rows]."""

COMPARISON_BUDGETS = 4
"""A comparison holds both sides' logits, and takes so many times the budget of prompt logprobs: on an H200 and a model
of 1B, chunks of 2,048 rows take 6 % less time than chunks of 512."""


class PromptLogprobs:
    """What takes the place of vLLM's function: its parameters, smaller integers.

    vLLM's own, which supports logits modes and more top tokens than `fused_logprobs` can, works within the budget as
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

    def head(self, logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> LMHead:
        """How to project. Ranks of a tensor-parallel group must come here at the same time."""
        if self._head is None:
            self._head = examine(logits_fn, hidden_states.shape[-1], hidden_states.dtype, get_tp_group())
        return self._head

    def prepare(
        self, logits_fn: LogitsFunction, hidden_states: torch.Tensor, num_top: int, num_candidates: int = 0
    ) -> tuple[LMHead, int]:
        """How to project, and rows of a chunk."""
        assert self._shape is not None
        head = self.head(logits_fn, hidden_states)
        row_bytes = row_bytes_fused(self._shape, num_top, head.copies, head.shard is not None)
        row_bytes += RESULT_BYTES * num_candidates
        return head, rows_per_chunk(self._budget_bytes, row_bytes)

    def compared_rows(self, head: LMHead, num_top: int, reference_logit_bytes: int) -> int:
        """Rows of both sides' logits that a comparison's budgets hold."""
        assert self._shape is not None
        row_bytes = row_bytes_compared(self._shape, reference_logit_bytes, num_top, head.copies, head.shard is not None)
        return rows_per_chunk(COMPARISON_BUDGETS * self._budget_bytes, row_bytes)

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        logits_fn: LogitsFunction,
        num_top: int,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> Scores:
        """See `fused_logprobs.compute`."""
        num_candidates = 0 if candidates is None else candidates.shape[1]
        head, limit = self.prepare(logits_fn, hidden_states, num_top, num_candidates)
        return fused_logprobs.compute(
            targets,
            hidden_states,
            head.project,
            num_top,
            limit,
            head.shard,
            candidates=candidates,
            temperature=temperature,
        )

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
        return self.score(prompt_token_ids, prompt_hidden_states, logits_fn, num_prompt_logprobs)


class FusedProjections(Projections):
    """Of one step."""

    def __init__(self, compute: PromptLogprobs, logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> None:
        self._compute = compute
        self._logits_fn = logits_fn
        self._head = compute.head(logits_fn, hidden_states)
        self.project, self.shard = self._head.project, self._head.shard

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> Scores:
        """See `Projections`."""
        return self._compute.score(targets, hidden_states, self._logits_fn, num_top, candidates, temperature)

    def compared_rows(self, num_top: int, reference_logit_bytes: int) -> int:
        """Rows of both sides' logits that are held at a time."""
        return self._compute.compared_rows(self._head, num_top, reference_logit_bytes)


def patch(budget_bytes: int, windows: ScoredWindows) -> None:
    """Patch the V2 model runner."""
    compute = PromptLogprobs(budget_bytes, prompt_logprob.compute_prompt_logprobs_with_chunking)
    load_model = GPUModelRunner.load_model

    def load_model_then_set_rows(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        prompt_logprob.CHUNK_SIZE = compute.load(logits_shape(self))

    GPUModelRunner.load_model = load_model_then_set_rows
    GPUModelRunner._scoremode_windows = windows
    prompt_logprob.compute_prompt_logprobs_with_chunking = compute
    _patch_windows(compute, windows)
    add_to_profile(GPUModelRunner, lambda runner, hidden_states: _reserve(runner, hidden_states, compute, windows))


def _patch_windows(compute: PromptLogprobs, windows: ScoredWindows) -> None:
    """Let marked requests take their own way, one level above chunks, which know no request."""
    worker_class = prompt_logprob.PromptLogprobsWorker
    add_request, remove_request = worker_class.add_request, worker_class.remove_request
    compute_prompt_logprobs = worker_class.compute_prompt_logprobs

    def add_request_or_window(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        add_request(self, req_id, req_idx, sampling_params)
        writes = get_tp_group().rank_in_group == 0
        if windows.add(req_id, sampling_params, writes=writes, device=self.device) is not None:
            self.uses_prompt_logprobs[req_idx] = False

    def remove_request_and_window(self: Any, req_id: str) -> None:
        remove_request(self, req_id)
        windows.remove(req_id)

    def compute_with_windows(
        self: Any,
        logits_fn: LogitsFunction,
        hidden_states: torch.Tensor,
        input_batch: Any,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        results: dict[str, LogprobsTensors] = compute_prompt_logprobs(
            self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        for place, req_id in enumerate(input_batch.req_ids):
            index = int(input_batch.idx_mapping_np[place])
            start, num_fed = int(input_batch.num_computed_prefill_tokens_np[place]), int(prompt_lens[index])
            window = windows.get(req_id)
            if window is None:
                if req_id in results:
                    num_after = start + int(input_batch.num_scheduled_tokens[place]) - num_fed
                    _cut_placeholders(results, req_id, num_after)
                continue
            # As in vLLM: the rows of a request that was preempted after its prompt have been returned.
            if start >= num_fed or num_fed < input_batch.prefill_len_np[place]:
                continue
            first, end = (int(each) for each in input_batch.query_start_loc_np[place : place + 2])
            projections = FusedProjections(compute, logits_fn, hidden_states)
            rows = window.step(start, hidden_states[first:end], all_token_ids[index], num_fed, projections)
            if rows is not None:
                results[req_id] = rows
                windows.remove(req_id)
        return results

    worker_class.add_request = add_request_or_window
    worker_class.remove_request = remove_request_and_window
    worker_class.compute_prompt_logprobs = compute_with_windows


def _cut_placeholders(results: dict[str, LogprobsTensors], request_id: str, num_after: int) -> None:
    """Remove the rows of positions after a prompt, of which there are `num_after`.

    Where drafts are made, vLLM pads a prompt of which one token is left with placeholders for them, and returns rows of
    all but the last.
    """
    if num_after <= 0:
        return
    result = results.pop(request_id)
    if len(result.logprobs) > num_after:
        token_ids, logprobs, ranks, *_ = result
        results[request_id] = LogprobsTensors(token_ids[:-num_after], logprobs[:-num_after], ranks[:-num_after])


def _reserve(runner: Any, hidden_states: torch.Tensor, compute: PromptLogprobs, windows: ScoredWindows) -> None:
    # Chunks have more rows where fewer tokens of a row are wanted; either can be the larger.
    logits_fn, mode = runner.model.compute_logits, runner.model_config.logprobs_mode
    for num_top in (0, RESERVED_TOP):
        _, limit = compute.prepare(logits_fn, hidden_states, num_top)
        states, targets = dummy_rows(hidden_states, min(limit, runner.max_num_tokens))
        compute(targets, states, logits_fn, num_top, mode)
    windows.reserve(runner, hidden_states, FusedProjections(compute, logits_fn, hidden_states))
