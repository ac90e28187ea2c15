"""vLLM's V2 model runner, patched: its prompt logprobs are those of a `RowScorer`."""

from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.kernels.working_memory import row_bytes_fused, rows_per_chunk
from scoremode_server.vllm_patches.lm_head import LogitsFunction
from scoremode_server.vllm_patches.profiling import add_to_profile, logits_shape
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows
from scoremode_server.vllm_patches.row_scorer import RowScorer, StepPart
from scoremode_server.vllm_patches.row_spec import RowSpec


def patch(budget_bytes: int, windows: ReferenceWindows | None) -> None:
    """Patch the V2 model runner."""
    load_model = GPUModelRunner.load_model

    def load_model_then_set_scorer(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        shape, mode = logits_shape(self), self.model_config.logprobs_mode
        # Of vLLM's own chunks, for prompts with `prompt_logprob_token_ids`.
        prompt_logprob.CHUNK_SIZE = rows_per_chunk(budget_bytes, row_bytes_fused(shape, 0, None))
        if self.prompt_logprobs_worker is not None:
            scorer = RowScorer(budget_bytes, shape, mode, get_tp_group(), windows)
            self.prompt_logprobs_worker._scoremode_scorer = scorer

    GPUModelRunner.load_model = load_model_then_set_scorer
    GPUModelRunner._scoremode_windows = windows
    _patch_worker(prompt_logprob.PromptLogprobsWorker)
    add_to_profile(GPUModelRunner, reserve)


def reserve(runner: Any, hidden_states: torch.Tensor) -> None:
    runner.prompt_logprobs_worker._scoremode_scorer.reserve(runner, hidden_states)


def _patch_worker(worker_class: Any) -> None:
    add_request, remove_request = worker_class.add_request, worker_class.remove_request

    def add_request_and_begin(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        add_request(self, req_id, req_idx, sampling_params)
        spec = RowSpec.read(sampling_params)
        if spec is not None:
            self._scoremode_scorer.begin(req_id, spec)

    def remove_request_and_drop(self: Any, req_id: str) -> None:
        remove_request(self, req_id)
        self._scoremode_scorer.drop(req_id)

    worker_class.add_request = add_request_and_begin
    worker_class.remove_request = remove_request_and_drop
    worker_class.compute_prompt_logprobs = compute_prompt_logprobs


def compute_prompt_logprobs(
    self: Any,
    logits_fn: LogitsFunction,
    hidden_states: torch.Tensor,
    input_batch: Any,
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prompt_lens: np.ndarray,
) -> dict[str, LogprobsTensors]:
    """The rows of the prompts that are complete with this step."""
    scorer, parts = self._scoremode_scorer, []
    for place, req_id in enumerate(input_batch.req_ids):
        if scorer.get(req_id) is None:
            continue
        position = int(input_batch.num_computed_prefill_tokens_np[place])
        num_fed = int(prompt_lens[input_batch.idx_mapping_np[place]])
        # As in vLLM: the rows of a request that was preempted after its prompt have been returned.
        if position >= num_fed or num_fed < input_batch.prefill_len_np[place]:
            scorer.drop(req_id)
            continue
        row, num_tokens = int(input_batch.query_start_loc_np[place]), int(input_batch.num_scheduled_tokens[place])
        parts.append(StepPart(req_id, position, row, num_tokens, num_fed))
    if not parts:
        return {}
    targets = prompt_logprob.get_prompt_logprobs_token_ids(
        input_batch.num_tokens, input_batch.query_start_loc, input_batch.idx_mapping, num_computed_tokens, all_token_ids
    )
    found: dict[str, LogprobsTensors] = scorer.score(parts, hidden_states, targets, logits_fn)
    return found
