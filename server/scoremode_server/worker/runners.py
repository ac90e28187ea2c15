"""Patches vLLM's V1 and V2 model runners: a `RowScorer` computes their prompt logprobs.

The stock V1 runner projects all of a step's rows at once, [tokens, vocabulary] in float32. vLLM does not profile this
memory, so a server that has given the rest to its KV cache runs out of it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.kernels.fused_logprobs import LogitsFunction
from scoremode_server.kernels.working_memory import LogitsShape, row_bytes_fused, rows_per_chunk
from scoremode_server.worker.request_rows import StepPart
from scoremode_server.worker.row_scorer import RowScorer
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import SinkMaker

WAITING_SHARE = 4
"""Limit on waiting logits (`WaitingRows`): the working memory divided by this."""


def patch_v1(budget_bytes: int, sinks: Mapping[str, SinkMaker]) -> None:
    """Patch the V1 model runner."""

    def scorer_of(runner: Any) -> RowScorer:
        scorer: RowScorer | None = getattr(runner, "_scoremode_scorer", None)
        if scorer is None:
            scorer = runner._scoremode_scorer = _make_scorer(runner, budget_bytes, sinks)
        return scorer

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        early: dict[str, LogprobsTensors] | None = self.__dict__.pop("_scoremode_early", None)
        return prompt_logprobs(self, scorer_of(self), hidden_states, num_scheduled_tokens) if early is None else early

    stock_sample_tokens = GPUModelRunner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        # vLLM drafts before it computes prompt logprobs, and the drafter's CUDA graph overwrites the hidden states that
        # prompt logprobs need (vLLM #53488). So they are computed first.
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
    GPUModelRunner._scoremode_sinks = sinks
    if current_platform.is_cpu():
        Sampler.compute_logprobs = staticmethod(exact_logprobs)
    _hook_forward_v1(scorer_of, sinks)
    _add_to_profile(GPUModelRunner, budget_bytes, sinks, reserve)


def _hook_forward_v1(scorer_of: Callable[[Any], RowScorer], sinks: Mapping[str, SinkMaker]) -> None:
    """Run the V1 model runner's forward passes within the contexts of the sinks' `around_forward`."""
    stock_forward, stock_dummy_run = GPUModelRunner._model_forward, GPUModelRunner._dummy_run

    def model_forward(self: Any, *args: Any, **options: Any) -> Any:
        if not _has_hooks(self, sinks):
            return stock_forward(self, *args, **options)
        request_ids = self.input_batch.req_ids
        num_tokens = np.diff(self.query_start_loc.np[: len(request_ids) + 1]).tolist()
        scorer = scorer_of(self)
        parts = step_parts(self, scorer, dict(zip(request_ids, num_tokens, strict=True)))
        with scorer.around_forward(self.model, parts):
            return stock_forward(self, *args, **options)

    def dummy_run(self: Any, *args: Any, **options: Any) -> Any:
        if not _has_hooks(self, sinks):
            return stock_dummy_run(self, *args, **options)
        with scorer_of(self).around_forward(self.model, []):
            return stock_dummy_run(self, *args, **options)

    GPUModelRunner._model_forward = model_forward
    GPUModelRunner._dummy_run = dummy_run


def exact_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Replace `Sampler.compute_logprobs` on a CPU, with sums in float64. PyTorch's float32 sums there shift all
    logprobs by 8e-6 nats in one direction, so sampled tokens' logprobs would differ from those of prompts."""
    return logits.double().log_softmax(-1).float()


def _has_hooks(runner: Any, sinks: Mapping[str, SinkMaker]) -> bool:
    """Whether forward passes are wrapped for sinks. A compiled model or a CUDA graph calls no hooks, and in a pipeline
    some ranks have no scorer."""
    is_whole = runner.parallel_config.pipeline_parallel_size == 1
    has_any = any(maker.has_hooks for maker in sinks.values())
    return has_any and is_whole and runner.model_config.enforce_eager


def step_parts(runner: Any, scorer: RowScorer, num_scheduled_tokens: Mapping[str, int]) -> list[StepPart]:
    """List the parts of prompts that a step of the V1 runner computes, in the order of their rows. Begins requests that
    are new to the scorer."""
    for request_id in scorer.requests.keys() - runner.requests.keys():
        del scorer.requests[request_id]
    parts = []
    for request_id in runner.num_prompt_logprobs:
        request, num_tokens = runner.requests[request_id], num_scheduled_tokens.get(request_id)
        # The request was preempted in its prefill, or has embeddings instead of tokens to score.
        if num_tokens is None or request.prompt_token_ids is None:
            continue
        position, rows = request.num_computed_tokens, scorer.requests.get(request_id)
        if rows is None or position != rows.end:
            # The request begins, or begins again after a preemption.
            spec = RowSpec.read(request.sampling_params)
            assert spec is not None
            scorer.begin(request_id, spec)
            # A second call in the same step must not begin it again.
            scorer.requests[request_id].end = position
        row = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
        parts.append(StepPart(request_id, position, row, num_tokens, len(request.prompt_token_ids)))
    return sorted(parts, key=lambda part: part.row)


def prompt_logprobs(
    runner: Any, scorer: RowScorer, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, LogprobsTensors]:
    """Score a step's rows. Returns the rows of the prompts that it completes, by request id."""
    parts = step_parts(runner, scorer, num_scheduled_tokens)
    if not parts:
        return {}
    targets = np.zeros(len(hidden_states), np.int64)
    for part in parts:
        after = part.position + 1
        following = runner.requests[part.request_id].prompt_token_ids[after : after + part.num_tokens]
        targets[part.row : part.row + len(following)] = following
    on_device = async_tensor_h2d(targets, device=runner.device)
    results = scorer.score(parts, hidden_states, on_device, runner.model.compute_logits)
    for part in parts:
        if part.position + part.num_tokens >= part.num_fed:
            del runner.num_prompt_logprobs[part.request_id]
    complete = {request_id: rows.to_cpu_nonblocking() for request_id, rows in results.items()}
    if complete:
        # Copies to the host are asynchronous: wait for them.
        runner._sync_device()
    return complete


def patch_v2(budget_bytes: int, sinks: Mapping[str, SinkMaker]) -> None:
    """Patch the V2 model runner."""
    load_model = GPUModelRunnerV2.load_model

    def load_model_then_set_scorer(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        # vLLM's own chunks, which it still uses for prompts with `prompt_logprob_token_ids`.
        prompt_logprob.CHUNK_SIZE = rows_per_chunk(budget_bytes, row_bytes_fused(_logits_shape(self), 0, None))
        if self.prompt_logprobs_worker is not None:
            self.prompt_logprobs_worker._scoremode_scorer = _make_scorer(self, budget_bytes, sinks)

    call_sampler = SamplerV2.__call__

    def keep_logits_and_call(self: Any, logits: torch.Tensor, input_batch: Any) -> Any:
        # Rows that can wait (`RequestRows.can_wait`) reuse the logits that their step samples from.
        is_whole = input_batch.num_reqs == input_batch.num_tokens
        if is_whole and logits.nbytes <= _waiting_bytes(budget_bytes, logits.device):
            input_batch._scoremode_logits = logits
        return call_sampler(self, logits, input_batch)

    def reserve(runner: Any, hidden_states: torch.Tensor) -> None:
        runner.prompt_logprobs_worker._scoremode_scorer.reserve(runner, hidden_states)

    SamplerV2.__call__ = keep_logits_and_call
    GPUModelRunnerV2.load_model = load_model_then_set_scorer
    GPUModelRunnerV2._scoremode_sinks = sinks
    _hook_forward_v2(sinks)
    _patch_worker(prompt_logprob.PromptLogprobsWorker)
    _add_to_profile(GPUModelRunnerV2, budget_bytes, sinks, reserve)


def _hook_forward_v2(sinks: Mapping[str, SinkMaker]) -> None:
    """Run the V2 model runner's forward passes within the contexts of the sinks' `around_forward`."""
    prepare_inputs, execute_model = GPUModelRunnerV2.prepare_inputs, GPUModelRunnerV2.execute_model

    def execute_within_hooks(self: Any, *args: Any, **options: Any) -> Any:
        if not _has_hooks(self, sinks) or self.prompt_logprobs_worker is None:
            return execute_model(self, *args, **options)
        with ExitStack() as hooks:
            self._scoremode_hooks = hooks
            if options.get("dummy_run"):
                hooks.enter_context(self.prompt_logprobs_worker._scoremode_scorer.around_forward(self.model, []))
            return execute_model(self, *args, **options)

    def prepare_inputs_then_hook(self: Any, *args: Any, **options: Any) -> Any:
        input_batch = prepare_inputs(self, *args, **options)
        if _has_hooks(self, sinks) and self.prompt_logprobs_worker is not None:
            scorer = self.prompt_logprobs_worker._scoremode_scorer
            has_sinks = any(request.sinks for request in scorer.requests.values())
            parts = batch_parts(scorer, input_batch, self.req_states.prompt_len.np) if has_sinks else []
            # The hooks stay until the step has ended. The model's forward pass comes next.
            self._scoremode_hooks.enter_context(scorer.around_forward(self.model, parts))
        return input_batch

    GPUModelRunnerV2.execute_model = execute_within_hooks
    GPUModelRunnerV2.prepare_inputs = prepare_inputs_then_hook


def _patch_worker(worker_class: Any) -> None:
    add_request, remove_request = worker_class.add_request, worker_class.remove_request

    def add_request_and_begin(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        add_request(self, req_id, req_idx, sampling_params)
        spec = RowSpec.read(sampling_params)
        if spec is not None:
            self._scoremode_scorer.begin(req_id, spec)

    def remove_request_and_drop(self: Any, req_id: str) -> None:
        remove_request(self, req_id)
        self._scoremode_scorer.requests.pop(req_id, None)

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
    """Score a step's rows. Returns the rows of the prompts that it completes, by request id."""
    scorer = self._scoremode_scorer
    logits = input_batch.__dict__.pop("_scoremode_logits", None)
    parts = batch_parts(scorer, input_batch, prompt_lens)
    if not parts:
        return {}
    targets = prompt_logprob.get_prompt_logprobs_token_ids(
        input_batch.num_tokens, input_batch.query_start_loc, input_batch.idx_mapping, num_computed_tokens, all_token_ids
    )
    # Reuse logits only if all requests are outside the prefill lane: these are greedy, so vLLM samples from unchanged
    # logits.
    if len(parts) < input_batch.num_reqs or not all(scorer.requests[part.request_id].can_wait for part in parts):
        logits = None
    return cast(dict[str, LogprobsTensors], scorer.score(parts, hidden_states, targets, logits_fn, logits))


def batch_parts(scorer: RowScorer, input_batch: Any, prompt_lens: np.ndarray) -> list[StepPart]:
    """List the parts of prompts that a step of the V2 runner computes."""
    parts = []
    columns = (
        input_batch.num_computed_prefill_tokens_np,
        input_batch.query_start_loc_np,
        input_batch.num_scheduled_tokens,
        prompt_lens[input_batch.idx_mapping_np],
        input_batch.prefill_len_np,
    )
    # Make lists first, because reading an array's entries one by one is slow.
    rows = zip(input_batch.req_ids, *(column.tolist() for column in columns), strict=False)
    for request_id, position, row, num_tokens, num_fed, num_prefilled in rows:
        if request_id not in scorer.requests:
            continue
        # As in vLLM: if a request was preempted after its prompt, its rows were already returned.
        if position >= num_fed or num_fed < num_prefilled:
            del scorer.requests[request_id]
        else:
            parts.append(StepPart(request_id, position, row, num_tokens, num_fed))
    return parts


def _add_to_profile(
    runner_class: Any,
    budget_bytes: int,
    sinks: Mapping[str, SinkMaker],
    reserve: Callable[[Any, torch.Tensor], None],
) -> None:
    """Run `reserve(runner, hidden states of the sampled rows)` after the sampler's dummy run, and hold the memory of
    waiting logits and of sinks while vLLM profiles.

    vLLM makes the dummy run while it profiles, on the last pipeline rank and for models that generate, and holds the
    hidden states of a full batch. The V1 runner repeats it after capturing CUDA graphs, when its allocator already has
    the memory.
    """
    if current_platform.is_cpu():
        # On a CPU vLLM does not profile temporary memory, and computing as many rows as a step may have would take
        # minutes.
        return
    dummy_sampler_run = runner_class._dummy_sampler_run

    @torch.inference_mode()
    def dummy_sampler_run_then_reserve(self: Any, hidden_states: torch.Tensor) -> Any:
        output = dummy_sampler_run(self, hidden_states)
        if not self.vllm_config.is_mm_encoder_only:
            reserve(self, hidden_states)
        return output

    profile_run = runner_class.profile_run

    def profile_run_next_to_waiting(self: Any, *args: Any, **options: Any) -> None:
        waiting = torch.empty(_waiting_bytes(budget_bytes, self.device), dtype=torch.uint8, device=self.device)
        generates = self.model_config.runner_type == "generate" and not self.vllm_config.is_mm_encoder_only
        if get_pp_group().is_last_rank and generates:
            for maker in sinks.values():
                maker.allocate(self.vllm_config, self.device)
        profile_run(self, *args, **options)
        del waiting

    runner_class._dummy_sampler_run = dummy_sampler_run_then_reserve
    runner_class.profile_run = profile_run_next_to_waiting


def _make_scorer(runner: Any, budget_bytes: int, sinks: Mapping[str, SinkMaker]) -> RowScorer:
    # Prompt tokens are not sampled, so processed and raw logprobs are the same.
    if not (mode := runner.model_config.logprobs_mode).endswith("_logprobs"):
        raise ValueError(f"Scoremode needs --logprobs-mode raw_logprobs or processed_logprobs, got {mode}")
    scorer = RowScorer(budget_bytes, _logits_shape(runner), get_tp_group(), sinks)
    scorer.waiting.max_bytes = _waiting_bytes(budget_bytes, scorer.group.device)
    return scorer


def _waiting_bytes(budget_bytes: int, device: torch.device) -> int:
    """Limit on the bytes of waiting logits: 0 on a CPU, where scoring many rows at once saves no memory reads."""
    return budget_bytes // WAITING_SHARE if device.type == "cuda" else 0


def _logits_shape(runner: Any) -> LogitsShape:
    config = runner.model_config
    return LogitsShape(config.get_vocab_size(), config.head_dtype.itemsize, runner.parallel_config.tensor_parallel_size)
