"""vLLM's V1 model runner, patched: prompt logprobs within a fixed working memory.

The runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32. That is not in the
memory that vLLM profiles, and a server that has given the rest to its KV cache dies of it. Here it takes as many rows
at a time as a budget holds, whatever the vocabulary and the length of the prompt, and one such chunk is computed while
vLLM profiles. There is no extension point.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
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


def patch(budget_bytes: int, windows: ScoredWindows) -> None:
    """Patch the V1 model runner."""

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        early = self.__dict__.pop("_scoremode_early", None)
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
    add_to_profile(GPUModelRunner, lambda runner, hidden_states: reserve(runner, hidden_states, budget_bytes, windows))


def reserve(runner: Any, hidden_states: torch.Tensor, budget_bytes: int, windows: ScoredWindows) -> None:
    projections = ChunkedProjections(runner, budget_bytes)
    rows = min(projections.chunk_rows(RESERVED_TOP), runner.max_num_tokens)
    # A step still holds the logits that it sampled from when it comes to prompt logprobs.
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

    def chunk_rows(self, num_top: int) -> int:
        """Rows of a chunk of prompt logprobs."""
        return rows_per_chunk(self._budget_bytes, row_bytes_v1(logits_shape(self._runner), num_top))

    def chunks(self, targets: torch.Tensor, hidden_states: torch.Tensor, num_top: int) -> Iterator[LogprobsTensors]:
        """Rows [rows, num_top + 1] as vLLM computes them, a chunk at a time; its tensors of the size of the vocabulary
        are gone when it is yielded."""
        rows = self.chunk_rows(num_top)
        for wanted, states in zip(targets.split(rows), hidden_states.split(rows), strict=True):
            yield self._runner.sampler.gather_logprobs(self._scores(states), num_top, wanted)

    def _scores(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32, in the server's logprobs mode. Prompt tokens are not sampled, so that processed
        and raw are the same."""
        logits = self.project(hidden_states)
        if self._runner.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
            return logits.to(torch.float32)
        return self._runner.sampler.compute_logprobs(logits)

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        """See `Projections`. By PyTorch in float64 on a CPU; plain logprobs as vLLM computes them."""
        if candidates is None and temperature == 1.0:
            chunks = list(self.chunks(targets, hidden_states, num_top))
            whole = LogprobsTensors.cat(chunks) if len(chunks) > 1 else chunks[0]
            return whole.logprob_token_ids, whole.logprobs, whole.selected_token_ranks
        num_columns = num_top + (0 if candidates is None else candidates.shape[1])
        shape = logits_shape(self._runner)
        rows = rows_per_chunk(max(1, self._budget_bytes - block_bytes(shape)), row_bytes_v1(shape, num_columns))
        return fused_logprobs.compute(
            targets,
            hidden_states,
            self.project,
            num_top,
            rows,
            candidates=candidates,
            temperature=temperature,
        )

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
            _write(result, first, projections.chunks(targets, states[:rows], num_top))
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


def _write(result: LogprobsTensors, first: int, chunks: Iterable[LogprobsTensors]) -> None:
    """Write rows that follow one another from the row `first` on."""
    for token_ids, logprobs, ranks, *_ in chunks:
        written = slice(first, first := first + len(ranks))
        result.logprob_token_ids[written].copy_(token_ids, non_blocking=True)
        result.logprobs[written].copy_(logprobs, non_blocking=True)
        result.selected_token_ranks[written].copy_(ranks, non_blocking=True)
