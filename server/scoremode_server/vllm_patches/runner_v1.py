"""vLLM's V1 model runner, patched: its prompt logprobs are those of a `RowScorer`.

The runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32. That is not in the
memory that vLLM profiles, and a server that has given the rest to its KV cache dies of it. There is no extension point.
"""

import math
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.vllm_patches.profiling import add_to_profile, logits_shape
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows
from scoremode_server.vllm_patches.row_scorer import RowScorer, StepPart
from scoremode_server.vllm_patches.row_spec import ROWS, RowSpec


def patch(budget_bytes: int, windows: ReferenceWindows | None) -> None:
    """Patch the V1 model runner."""

    def scorer_of(runner: Any) -> RowScorer:
        scorer: RowScorer | None = runner.__dict__.get("_scoremode_scorer")
        if scorer is None:
            mode = runner.model_config.logprobs_mode
            scorer = RowScorer(budget_bytes, logits_shape(runner), mode, get_tp_group(), windows)
            runner._scoremode_scorer = scorer
        return scorer

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        early: dict[str, LogprobsTensors] | None = self.__dict__.pop("_scoremode_early", None)
        return prompt_logprobs(self, scorer_of(self), hidden_states, num_scheduled_tokens) if early is None else early

    stock_sample_tokens = GPUModelRunner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        # vLLM drafts before it makes prompt logprobs, and a drafter's CUDA graph overwrites the hidden states that they
        # are made of (vLLM #53488).
        state = self.execute_model_state
        if state is not None and self.speculative_config is not None:
            step = state.scheduler_output
            hidden_states = state.hidden_states[: step.total_num_scheduled_tokens]
            self._scoremode_early = prompt_logprobs(self, scorer_of(self), hidden_states, step.num_scheduled_tokens)
        return stock_sample_tokens(self, grammar_output)

    def reserve(runner: Any, hidden_states: torch.Tensor) -> None:
        # A step still holds the logits that it sampled from when it computes prompt logprobs.
        sampled_logits = runner.model.compute_logits(hidden_states)
        scorer_of(runner).reserve(runner, hidden_states)
        del sampled_logits

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    GPUModelRunner.sample_tokens = sample_tokens
    GPUModelRunner._scoremode_windows = windows
    if current_platform.is_cpu():
        Sampler.compute_logprobs = staticmethod(exact_logprobs)
    add_to_profile(GPUModelRunner, reserve)


def exact_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """`Sampler.compute_logprobs` with sums in float64: PyTorch's float32 sums on a CPU move all logprobs by 8e-6 nats
    in one direction, so that sampled tokens' would not be as those of prompts."""
    return logits.double().log_softmax(-1).float()


def prompt_logprobs(
    runner: Any, scorer: RowScorer, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, LogprobsTensors]:
    """The rows of the prompts that are complete with this step."""
    scorer.keep_only(runner.requests)
    parts = []
    targets = np.zeros(len(hidden_states), np.int64)
    for request_id in runner.num_prompt_logprobs:
        request, num_tokens = runner.requests[request_id], num_scheduled_tokens.get(request_id)
        # Preempted in its prefill; or given as embeddings, without tokens to score.
        if num_tokens is None or request.prompt_token_ids is None:
            continue
        position, rows = request.num_computed_tokens, scorer.get(request_id)
        if rows is None or position != rows.end:
            # Begun, or begun again after it was preempted.
            spec = RowSpec.read(request.sampling_params)
            assert spec is not None
            scorer.begin(request_id, spec)
        row = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
        following = request.prompt_token_ids[position + 1 : position + 1 + num_tokens]
        targets[row : row + len(following)] = following
        parts.append(StepPart(request_id, position, row, num_tokens, len(request.prompt_token_ids)))
    if not parts:
        return {}
    parts.sort(key=lambda part: part.row)
    on_device = async_tensor_h2d(targets, device=runner.device)
    found = scorer.score(parts, hidden_states, on_device, runner.model.compute_logits)
    complete = {}
    for part in parts:
        if part.position + part.num_tokens >= part.num_fed:
            del runner.num_prompt_logprobs[part.request_id]
            rows = found.get(part.request_id)
            if rows is not None:
                is_ours = ROWS in (runner.requests[part.request_id].sampling_params.extra_args or ())
                num_cached = 0 if is_ours else part.num_fed - 1 - len(rows.logprobs)
                complete[part.request_id] = (_after_nan(rows, num_cached) if num_cached else rows).to_cpu_nonblocking()
    if complete:
        # Copies to the host do not block.
        runner._sync_device()
    return complete


def _after_nan(rows: LogprobsTensors, num_cached: int) -> LogprobsTensors:
    """Rows after those of positions from the prefix cache: vLLM's own V1 runner returns them, with anything in them."""
    unknown = [each.new_full((num_cached, *each.shape[1:]), 0) for each in rows[:3]]
    unknown[1].fill_(math.nan)
    return LogprobsTensors.cat([LogprobsTensors(*unknown), rows])
