"""Prompt logprobs within a fixed working memory, whatever the vocabulary and the length of the prompt.

vLLM's V1 model runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32; V2 takes
1,024 rows at a time. Neither is in the memory that vLLM profiles, and a server that has given the rest to its KV cache
dies of it. Here both runners take as many rows at a time as a budget holds, and one such chunk is computed while vLLM
profiles. These are patches; there is no extension point.

Ranks of a tensor-parallel group project together, so all of them take the budget of the first.
"""

import math
import os
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.worker_base import WorkerWrapperBase

from scoremode_server.engine.logits_memory import RESERVED_TOP, row_bytes_v1, rows_per_chunk
from scoremode_server.engine.profiling import add_to_profile, dummy_rows, logits_shape
from scoremode_server.engine.vllm_version import expect

BUDGET_BYTES = 256 * 1024**2
BUDGET_VARIABLE = "SCOREMODE_LOGPROB_BYTES"


def install(budget_bytes: int | None = None) -> None:
    """Patch vLLM in this process; once is enough, and more does no harm: the first budget stays.

    The model runners are patched when a worker of this process has its device. API servers load plugins too, and have
    no use for model runners; and some are not importable before the platform is set up.

    Args:
        budget_bytes: working memory; by default the environment's SCOREMODE_LOGPROB_BYTES, else 256 MiB.

    Raises:
        RuntimeError: a method that is wrapped is not as it was.
        ValueError: the budget is not a positive number of bytes.
    """
    budget = budget_from_environment() if budget_bytes is None else budget_bytes
    if budget < 1:
        raise ValueError(f"the working memory for prompt logprobs must be positive, and is {budget}")
    if getattr(WorkerWrapperBase, "_scoremode_bounded", False):
        return
    expect(WorkerWrapperBase, "init_device", "self")
    init_device = WorkerWrapperBase.init_device

    def init_device_then_patch(self: Any) -> None:
        init_device(self)
        patch_runners(get_tp_group().broadcast_object(budget))

    WorkerWrapperBase.init_device = init_device_then_patch
    WorkerWrapperBase._scoremode_bounded = True


def budget_from_environment() -> int:
    """Bytes from SCOREMODE_LOGPROB_BYTES, or the default.

    Raises:
        ValueError: it is set to something else than a whole number.
    """
    setting = os.environ.get(BUDGET_VARIABLE)
    if setting is None:
        return BUDGET_BYTES
    if not setting.isdecimal():
        raise ValueError(f"{BUDGET_VARIABLE} must be a whole number of bytes, and is {setting!r}")
    return int(setting)


def patch_runners(budget_bytes: int) -> None:
    """Patch both model runners, once a process.

    Raises:
        RuntimeError: a method that is replaced is not the one that this was written for.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from scoremode_server.engine import runner_v2

    if getattr(GPUModelRunner, "_scoremode_bounded", False):
        return
    _patch_v1(GPUModelRunner, budget_bytes)
    runner_v2.patch(budget_bytes)
    GPUModelRunner._scoremode_bounded = True


def _patch_v1(runner_class: type, budget_bytes: int) -> None:
    expect(runner_class, "_get_prompt_logprobs_dict", "self", "hidden_states", "num_scheduled_tokens")

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        return _prompt_logprobs_v1(self, hidden_states, num_scheduled_tokens, budget_bytes)

    runner_class._get_prompt_logprobs_dict = get_prompt_logprobs_dict  # type: ignore[attr-defined]
    add_to_profile(runner_class, lambda runner, hidden_states: _reserve_v1(runner, hidden_states, budget_bytes))


def _reserve_v1(runner: Any, hidden_states: torch.Tensor, budget_bytes: int) -> None:
    rows = min(_rows_v1(runner, RESERVED_TOP, budget_bytes), runner.max_num_tokens)
    # A step still holds the logits that it sampled from when it comes to prompt logprobs.
    sampled_logits = runner.model.compute_logits(hidden_states)
    _chunk_v1(runner, *dummy_rows(hidden_states, rows), RESERVED_TOP)
    del sampled_logits


def _prompt_logprobs_v1(
    runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int], budget_bytes: int
) -> dict[str, LogprobsTensors]:
    """Compute the rows that this step has of every prompt; return the prompts that are complete with them."""
    complete = {}
    for request_id, num_top in runner.num_prompt_logprobs.items():
        num_tokens = num_scheduled_tokens.get(request_id)
        if num_tokens is None:
            # Preempted in its prefill.
            continue
        request = runner.requests[request_id]
        if request.prompt_token_ids is None:
            # Given as embeddings, it has no tokens to score.
            continue
        result = _result_v1(request, num_top)
        first = request.num_computed_tokens
        remaining = len(request.prompt_token_ids) - 1 - first
        _fill_v1(runner, request_id, result, hidden_states, min(num_tokens, remaining), num_top, budget_bytes)
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


def _result_v1(request: Any, num_top: int) -> LogprobsTensors:
    """Tensors for all rows of a prompt, on the host; NaN where no step has computed a row."""
    if request.in_progress_prompt_logprobs_cpu is None:
        result = LogprobsTensors.empty_cpu(len(request.prompt_token_ids) - 1, num_top + 1)
        # Rows behind blocks from the prefix cache are never written, and what memory held must not pass for a number.
        result.logprobs.fill_(math.nan)
        request.in_progress_prompt_logprobs_cpu = result
    return request.in_progress_prompt_logprobs_cpu


def _fill_v1(
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
    chunk_rows = _rows_v1(runner, num_top, budget_bytes)
    for start in range(0, rows, chunk_rows):
        end = min(start + chunk_rows, rows)
        token_ids, logprobs, ranks, *_ = _chunk_v1(
            runner, hidden_states[offset + start : offset + end], targets[start:end], num_top
        )
        written = slice(first + start, first + end)
        result.logprob_token_ids[written].copy_(token_ids, non_blocking=True)
        result.logprobs[written].copy_(logprobs, non_blocking=True)
        result.selected_token_ranks[written].copy_(ranks, non_blocking=True)


def _chunk_v1(runner: Any, hidden_states: torch.Tensor, targets: torch.Tensor, num_top: int) -> LogprobsTensors:
    """Rows of hidden states [rows, hidden] and target tokens [rows] -> [rows, num_top + 1]; its tensors of the size of
    the vocabulary are gone when it returns."""
    return runner.sampler.gather_logprobs(_scores_v1(runner, hidden_states), num_top, targets)


def _scores_v1(runner: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] float32, in the server's logprobs mode. Prompt tokens are not sampled, so that processed and
    raw are the same."""
    logits = runner.model.compute_logits(hidden_states)
    if runner.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
        return logits.to(torch.float32)
    return runner.sampler.compute_logprobs(logits)


def _rows_v1(runner: Any, num_top: int, budget_bytes: int) -> int:
    return rows_per_chunk(budget_bytes, row_bytes_v1(logits_shape(runner), num_top))
