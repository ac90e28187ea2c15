"""vLLM's V1 model runner, patched: prompt logprobs within a fixed working memory.

The runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32. That is not in the
memory that vLLM profiles, and a server that has given the rest to its KV cache dies of it. Here it takes as many rows
at a time as a budget holds, for any vocabulary and any length of the prompt, and one such chunk is computed while
vLLM profiles. There is no extension point.
"""

import math
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.working_memory import (
    RESERVED_TOP,
    block_bytes,
    row_bytes_compared,
    row_bytes_v1,
    rows_per_chunk,
)
from scoremode_server.vllm_patches.profiling import add_to_profile, dummy_rows, logits_shape
from scoremode_server.vllm_patches.scored_windows import ScoredWindows
from scoremode_server.vllm_patches.windows import Projections

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


def patch(budget_bytes: int, windows: ScoredWindows) -> None:
    """Patch the V1 model runner."""

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        early: dict[str, LogprobsTensors] | None = self.__dict__.pop("_scoremode_early", None)
        if early is not None:
            return early
        return prompt_logprobs(self, hidden_states, num_scheduled_tokens, budget_bytes, windows)

    stock_sample_tokens = GPUModelRunner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        # vLLM drafts before it makes prompt logprobs, and a drafter's CUDA graph overwrites the hidden states that they
        # are made of (vLLM #53488).
        state = self.execute_model_state
        if state is not None and self.speculative_config is not None:
            step = state.scheduler_output
            hidden_states = state.hidden_states[: step.total_num_scheduled_tokens]
            self._scoremode_early = prompt_logprobs(
                self, hidden_states, step.num_scheduled_tokens, budget_bytes, windows
            )
        return stock_sample_tokens(self, grammar_output)

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    GPUModelRunner.sample_tokens = sample_tokens
    GPUModelRunner._scoremode_windows = windows
    if current_platform.is_cpu():
        Sampler.compute_logprobs = staticmethod(exact_logprobs)
    add_to_profile(GPUModelRunner, lambda runner, hidden_states: reserve(runner, hidden_states, budget_bytes, windows))


def exact_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """`Sampler.compute_logprobs` with sums in float64: PyTorch's float32 sums on a CPU move all logprobs by 8e-6 nats
    in one direction, so that the last token of a sequence, which is sampled, would not be as the others."""
    return logits.double().log_softmax(-1).float()


def reserve(runner: Any, hidden_states: torch.Tensor, budget_bytes: int, windows: ScoredWindows) -> None:
    projections = ChunkedProjections(runner, budget_bytes)
    rows = min(projections.chunk_rows(RESERVED_TOP), runner.max_num_tokens)
    # A step still holds the logits that it sampled from when it computes prompt logprobs.
    sampled_logits = runner.model.compute_logits(hidden_states)
    states, targets = dummy_rows(hidden_states, rows)
    projections.score(targets, states, RESERVED_TOP)
    windows.reserve(runner, hidden_states, projections)
    del sampled_logits


class ChunkedProjections(Projections):
    """Of the V1 runner, which gathers the whole vocabulary on each rank."""

    shard = None

    def __init__(self, runner: Any, budget_bytes: int) -> None:
        self._runner = runner
        self._budget_bytes = budget_bytes
        self.project = runner.model.compute_logits

    def chunk_rows(self, num_columns: int) -> int:
        """Rows whose logits and results of so many tokens, besides the target's, the budget holds."""
        shape = logits_shape(self._runner)
        budget = max(1, self._budget_bytes - block_bytes(shape))
        return rows_per_chunk(budget, row_bytes_v1(shape, num_columns))

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        """See `Projections`. Modes of logits, and more of the top tokens than `fused_logprobs` finds, are vLLM's."""
        rows = self.chunk_rows(num_top + (0 if candidates is None else candidates.shape[1]))
        if self._runner.model_config.logprobs_mode not in LOGPROBS_MODES or not 0 <= num_top <= fused_logprobs.MAX_TOP:
            return self._scored_by_vllm(targets, hidden_states, num_top, rows)
        return fused_logprobs.compute(
            targets,
            hidden_states,
            self.project,
            num_top,
            rows,
            candidates=candidates,
            temperature=temperature,
        )

    def _scored_by_vllm(
        self, targets: torch.Tensor, hidden_states: torch.Tensor, num_top: int, rows: int
    ) -> tuple[torch.Tensor, ...]:
        # Prompt tokens are not sampled, so that processed and raw are the same.
        is_logprobs = self._runner.model_config.logprobs_mode in LOGPROBS_MODES
        sampler = self._runner.sampler
        chunks = []
        for wanted, states in zip(targets.split(rows), hidden_states.split(rows), strict=True):
            logits = self.project(states)
            scores = sampler.compute_logprobs(logits) if is_logprobs else logits.to(torch.float32)
            chunks.append(sampler.gather_logprobs(scores, num_top, wanted))
        token_ids, logprobs, ranks, *_ = LogprobsTensors.cat(chunks)
        return token_ids, logprobs, ranks

    def compared_rows(self, num_top: int, reference_logit_bytes: int) -> int:
        """Rows of both sides' logits that are held at a time."""
        shape = logits_shape(self._runner)
        row_bytes = row_bytes_compared(shape, reference_logit_bytes, num_top, None)
        return rows_per_chunk(max(1, self._budget_bytes - block_bytes(shape)), row_bytes)


def prompt_logprobs(
    runner: Any,
    hidden_states: torch.Tensor,
    num_scheduled_tokens: dict[str, int],
    budget_bytes: int,
    windows: ScoredWindows,
) -> dict[str, LogprobsTensors]:
    """Compute the rows that this step has of every prompt; return the prompts that are complete with them."""
    complete = {}
    projections = ChunkedProjections(runner, budget_bytes)
    windows.keep_only(runner.requests)
    for request_id, num_top in runner.num_prompt_logprobs.items():
        num_tokens = num_scheduled_tokens.get(request_id)
        if num_tokens is None:
            # Preempted in its prefill.
            continue
        request = runner.requests[request_id]
        if request.prompt_token_ids is None:
            # Given as embeddings, it has no tokens to score.
            continue
        start = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
        states, first = hidden_states[start : start + num_tokens], request.num_computed_tokens
        window, params = windows.get(request_id), request.sampling_params
        if (window is None or first < window.end) and params and params.extra_args:
            # Begun, or begun again after it was preempted, if it is marked.
            writes = get_tp_group().rank_in_group == 0
            window = windows.add(request_id, params, writes=writes, device=runner.device)
        if window is not None:
            token_ids = async_tensor_h2d(request.prompt_token_ids, device=runner.device)
            finished = window.step(first, states, token_ids, len(token_ids), projections)
            if finished is not None:
                complete[request_id] = finished.to_cpu_nonblocking()
                windows.remove(request_id)
            continue
        result = _result(request, num_top)
        remaining = len(request.prompt_token_ids) - 1 - first
        rows = min(num_tokens, remaining)
        if rows > 0:
            targets = async_tensor_h2d(request.prompt_token_ids[first + 1 : first + 1 + rows], device=runner.device)
            _write(result, first, projections.score(targets, states[:rows], num_top))
        # With the tokens equal to the rows the prompt is complete as well, but only the next step samples, and vLLM
        # expects prompt logprobs together with a sampled token.
        if num_tokens > remaining:
            complete[request_id] = result
    for request_id in complete:
        del runner.num_prompt_logprobs[request_id]
        runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
    if complete:
        # Copies to the host do not block.
        runner._sync_device()
    return complete


def _result(request: Any, num_top: int) -> LogprobsTensors:
    """Tensors for all rows of a prompt, on the host; NaN where no step has computed a row."""
    if request.in_progress_prompt_logprobs_cpu is None:
        result = LogprobsTensors.empty_cpu(len(request.prompt_token_ids) - 1, num_top + 1)
        # Rows of blocks from the prefix cache are never written, and what memory held must not pass for a number.
        result.logprobs.fill_(math.nan)
        request.in_progress_prompt_logprobs_cpu = result
    return request.in_progress_prompt_logprobs_cpu


def _write(result: LogprobsTensors, first: int, scores: tuple[torch.Tensor, ...]) -> None:
    """Write rows that follow one another from the row `first` on."""
    token_ids, logprobs, ranks = scores
    written = slice(first, first + len(ranks))
    result.logprob_token_ids[written].copy_(token_ids, non_blocking=True)
    result.logprobs[written].copy_(logprobs, non_blocking=True)
    result.selected_token_ranks[written].copy_(ranks, non_blocking=True)
