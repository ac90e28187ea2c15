"""vLLM's V1 model runner, patched: prompt logprobs within a fixed working memory.

The runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32. That is not in the
memory that vLLM profiles, and a server that has given the rest to its KV cache dies of it. Here it takes as many rows
at a time as a budget holds, whatever the vocabulary and the length of the prompt, and one such chunk is computed while
vLLM profiles. There is no extension point.
"""

import math
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
from scoremode_server.vllm_patches.windows import Projections, Window


def patch(budget_bytes: int, windows: ScoredWindows) -> None:
    """Patch the V1 model runner."""

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        return prompt_logprobs(self, hidden_states, num_scheduled_tokens, budget_bytes, windows)

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    GPUModelRunner._scoremode_windows = windows
    add_to_profile(GPUModelRunner, lambda runner, hidden_states: reserve(runner, hidden_states, budget_bytes, windows))


def reserve(runner: Any, hidden_states: torch.Tensor, budget_bytes: int, windows: ScoredWindows) -> None:
    rows = min(_chunk_rows(runner, RESERVED_TOP, budget_bytes), runner.max_num_tokens)
    # A step still holds the logits that it sampled from when it comes to prompt logprobs.
    sampled_logits = runner.model.compute_logits(hidden_states)
    _score_chunk(runner, *dummy_rows(hidden_states, rows), RESERVED_TOP)
    windows.reserve(runner, hidden_states, ChunkedProjections(runner, budget_bytes))
    del sampled_logits


class ChunkedProjections(Projections):
    """Of the V1 runner, which gathers the whole vocabulary on each rank."""

    shard = None

    def __init__(self, runner: Any, budget_bytes: int) -> None:
        self._runner = runner
        self._budget_bytes = budget_bytes
        self.project = runner.model.compute_logits

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        """See `Projections`. By PyTorch in float64 on a CPU; plain logprobs as vLLM computes them."""
        num_columns = num_top + (0 if candidates is None else candidates.shape[1])
        if candidates is None and temperature == 1.0:
            return self._score_as_vllm(targets, hidden_states, num_top)
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

    def _score_as_vllm(
        self, targets: torch.Tensor, hidden_states: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, ...]:
        chunk_rows = _chunk_rows(self._runner, num_top, self._budget_bytes)
        chunks = [
            _score_chunk(
                self._runner, hidden_states[start : start + chunk_rows], targets[start : start + chunk_rows], num_top
            )
            for start in range(0, len(targets), chunk_rows)
        ]
        whole = LogprobsTensors.cat(chunks) if len(chunks) > 1 else chunks[0]
        return whole.logprob_token_ids, whole.logprobs, whole.selected_token_ranks

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
        window = _window(runner, windows, request_id, request)
        if window is not None:
            rows = _step_window(runner, window, request_id, hidden_states, num_tokens, budget_bytes)
            if rows is not None:
                complete[request_id] = rows
                windows.remove(request_id)
            continue
        result = _result(request, num_top)
        first = request.num_computed_tokens
        remaining = len(request.prompt_token_ids) - 1 - first
        _fill(runner, request_id, result, hidden_states, min(num_tokens, remaining), num_top, budget_bytes)
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


def _window(runner: Any, windows: ScoredWindows, request_id: str, request: Any) -> Window | None:
    window = windows.get(request_id)
    if window is not None and request.num_computed_tokens >= window.end:
        return window
    if not (request.sampling_params and request.sampling_params.extra_args):
        # Marks are there.
        return None
    # Begun, or begun again after it was preempted.
    writes = get_tp_group().rank_in_group == 0
    return windows.add(request_id, request.sampling_params, writes=writes, device=runner.device)


def _step_window(
    runner: Any, window: Window, request_id: str, hidden_states: torch.Tensor, num_tokens: int, budget_bytes: int
) -> LogprobsTensors | None:
    request = runner.requests[request_id]
    offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
    rows = window.step(
        request.num_computed_tokens,
        hidden_states[offset : offset + num_tokens],
        async_tensor_h2d(request.prompt_token_ids, device=runner.device),
        len(request.prompt_token_ids),
        ChunkedProjections(runner, budget_bytes),
    )
    return None if rows is None else rows.to_cpu_nonblocking()


def _result(request: Any, num_top: int) -> LogprobsTensors:
    """Tensors for all rows of a prompt, on the host; NaN where no step has computed a row."""
    if request.in_progress_prompt_logprobs_cpu is None:
        result = LogprobsTensors.empty_cpu(len(request.prompt_token_ids) - 1, num_top + 1)
        # Rows of blocks from the prefix cache are never written, and what memory held must not pass for a number.
        result.logprobs.fill_(math.nan)
        request.in_progress_prompt_logprobs_cpu = result
    return request.in_progress_prompt_logprobs_cpu


def _fill(
    runner: Any,
    request_id: str,
    result: LogprobsTensors,
    hidden_states: torch.Tensor,
    rows: int,
    num_top: int,
    budget_bytes: int,
) -> None:
    """Write `rows` rows, those that follow the prompt's computed tokens. `hidden_states` [tokens, hidden] are of all
    requests in the step."""
    if rows <= 0:
        return
    request = runner.requests[request_id]
    offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
    first = request.num_computed_tokens
    targets = async_tensor_h2d(request.prompt_token_ids[first + 1 : first + 1 + rows], device=runner.device)
    chunk_rows = _chunk_rows(runner, num_top, budget_bytes)
    for start in range(0, rows, chunk_rows):
        end = min(start + chunk_rows, rows)
        token_ids, logprobs, ranks, *_ = _score_chunk(
            runner, hidden_states[offset + start : offset + end], targets[start:end], num_top
        )
        written = slice(first + start, first + end)
        result.logprob_token_ids[written].copy_(token_ids, non_blocking=True)
        result.logprobs[written].copy_(logprobs, non_blocking=True)
        result.selected_token_ranks[written].copy_(ranks, non_blocking=True)


def _score_chunk(runner: Any, hidden_states: torch.Tensor, targets: torch.Tensor, num_top: int) -> LogprobsTensors:
    """Rows of hidden states [rows, hidden] and target tokens [rows] -> [rows, num_top + 1]; its tensors of the size of
    the vocabulary are gone when it returns."""
    return runner.sampler.gather_logprobs(_scores(runner, hidden_states), num_top, targets)


def _scores(runner: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] float32, in the server's logprobs mode. Prompt tokens are not sampled, so that processed and
    raw are the same."""
    logits = runner.model.compute_logits(hidden_states)
    if runner.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
        return logits.to(torch.float32)
    return runner.sampler.compute_logprobs(logits)


def _chunk_rows(runner: Any, num_top: int, budget_bytes: int) -> int:
    return rows_per_chunk(budget_bytes, row_bytes_v1(logits_shape(runner), num_top))
