"""Prompt logprobs within a fixed working memory, whatever the vocabulary and the length of the prompt.

vLLM's V1 model runner projects all rows that a step has of a prompt at once, [tokens, vocabulary] in float32; V2 takes
1,024 rows at a time. Neither is in the memory that vLLM profiles, and a server that has given the rest to its KV cache
dies of it. Here both runners take as many rows at a time as a budget holds, and one such chunk is computed while vLLM
profiles. These are patches; there is no extension point.

Ranks of a tensor-parallel group project together, so all of them take the budget of the first.
"""

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.worker_base import WorkerWrapperBase

from scoremode_server.engine.vllm_version import require_patched_version

BUDGET_BYTES = 256 * 1024**2
BUDGET_VARIABLE = "SCOREMODE_LOGPROB_BYTES"

RESERVED_TOP = 20
"""Likeliest tokens a position that are counted and reserved: vLLM's default `max_logprobs`."""

FLOAT32_BYTES = 4
VOCABULARY_PADDING = 64
"""vLLM pads the rows of the vocabulary projection to a multiple of this."""

RESULT_BYTES = 28
"""Per token returned: top-k values and indices (4 + 8), both again with the actual token before them, indices as int32
(4 + 8 + 4)."""

TOP_K_BYTES = 1
"""Per vocabulary entry: CUDA's multi-block top-k counts in 512 bytes for every 1,024 entries or more."""

TILE_ROWS = 128
"""Rows that the projection's kernels compute together; part of a tile costs as much as all of it."""


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """What decides the size of one row of logits.

    Attributes:
        vocab_size: entries, before padding.
        logit_bytes: of one logit as the projection leaves it, in the dtype of the model's head.
        tensor_parallel_size: ranks that the vocabulary is divided among.
    """

    vocab_size: int
    logit_bytes: int
    tensor_parallel_size: int = 1

    @property
    def padded(self) -> int:
        """Entries of a row in memory."""
        return math.ceil(self.vocab_size / VOCABULARY_PADDING) * VOCABULARY_PADDING

    @property
    def projection_bytes(self) -> float:
        """Bytes per vocabulary entry at the peak of `compute_logits`."""
        if self.tensor_parallel_size == 1:
            # Models that cap or scale their logits hold them before and after; it cannot be told which models do.
            return 2 * self.logit_bytes
        # The shard, all shards as they arrive, and the same again in the order of the vocabulary.
        return (2 + 1 / self.tensor_parallel_size) * self.logit_bytes


def row_bytes_v1(shape: LogitsShape, num_top: int = RESERVED_TOP) -> int:
    """Peak working memory per row on the V1 runner, with `num_top` likeliest tokens.

    Three peaks: the projection; `log_softmax` (the logits, a float32 copy unless they are float32, the logprobs); and
    top-k over the logprobs. vLLM compiles the rank count, which then allocates nothing per entry.
    """
    copy_bytes = 0 if shape.logit_bytes == FLOAT32_BYTES else FLOAT32_BYTES
    log_softmax_bytes = shape.logit_bytes + copy_bytes + FLOAT32_BYTES
    entry_bytes = max(shape.projection_bytes, log_softmax_bytes, FLOAT32_BYTES + TOP_K_BYTES)
    return _row_bytes(shape, entry_bytes, num_top)


def row_bytes_v2(shape: LogitsShape, num_top: int = RESERVED_TOP) -> int:
    """Peak working memory per row on the V2 runner, with `num_top` likeliest tokens.

    Two peaks: the projection, and top-k beside the logits. Its kernels for logprobs and ranks read logits in place.
    """
    return _row_bytes(shape, max(shape.projection_bytes, shape.logit_bytes + TOP_K_BYTES), num_top)


def _row_bytes(shape: LogitsShape, entry_bytes: float, num_top: int) -> int:
    return math.ceil(shape.padded * entry_bytes) + RESULT_BYTES * (num_top + 1)


def rows_per_chunk(budget_bytes: int, row_bytes: int) -> int:
    """Rows whose working memory stays within the budget, in whole tiles where there are several; at least one."""
    rows = budget_bytes // row_bytes
    return max(1, rows - rows % TILE_ROWS if rows > TILE_ROWS else rows)


def install(budget_bytes: int | None = None) -> None:
    """Patch vLLM in this process; once is enough, and more does no harm: the first budget stays.

    The model runners are patched when a worker of this process has its device. API servers load plugins too, and have
    no use for model runners; and some are not importable before the platform is set up.

    Args:
        budget_bytes: working memory; by default the environment's SCOREMODE_LOGPROB_BYTES, else 256 MiB.

    Raises:
        RuntimeError: this is not the vLLM that the patch was made for.
        ValueError: the budget is not a positive number of bytes.
    """
    require_patched_version()
    budget = budget_from_environment() if budget_bytes is None else budget_bytes
    if budget < 1:
        raise ValueError(f"the working memory for prompt logprobs must be positive, and is {budget}")
    if getattr(WorkerWrapperBase, "_scoremode_bounded", False):
        return
    _expect(WorkerWrapperBase, "init_device", "self")
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

    if getattr(GPUModelRunner, "_scoremode_bounded", False):
        return
    _patch_v1(GPUModelRunner, budget_bytes)
    _patch_v2(budget_bytes)
    GPUModelRunner._scoremode_bounded = True


def _patch_v1(runner_class: type, budget_bytes: int) -> None:
    _expect(runner_class, "_get_prompt_logprobs_dict", "self", "hidden_states", "num_scheduled_tokens")

    def get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors]:
        return _prompt_logprobs_v1(self, hidden_states, num_scheduled_tokens, budget_bytes)

    runner_class._get_prompt_logprobs_dict = get_prompt_logprobs_dict  # type: ignore[attr-defined]
    _add_to_profile(runner_class, lambda runner, hidden_states: _reserve_v1(runner, hidden_states, budget_bytes))


def _patch_v2(budget_bytes: int) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample import prompt_logprob

    compute = prompt_logprob.compute_prompt_logprobs_with_chunking
    _expect(
        prompt_logprob,
        "compute_prompt_logprobs_with_chunking",
        *("prompt_token_ids", "prompt_hidden_states", "logits_fn", "num_prompt_logprobs", "logprobs_mode"),
    )
    for function in (compute, prompt_logprob.PromptLogprobsWorker.compute_prompt_token_id_logprobs):
        if "CHUNK_SIZE" not in function.__code__.co_names:
            raise _changed(prompt_logprob, function.__name__)
    _expect(GPUModelRunner, "load_model", "self", "load_dummy_weights", "args", "model", "kwargs")
    load_model = GPUModelRunner.load_model

    def load_model_then_set_rows(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        prompt_logprob.CHUNK_SIZE = rows_per_chunk(budget_bytes, row_bytes_v2(_logits_shape(self)))

    GPUModelRunner.load_model = load_model_then_set_rows
    _add_to_profile(GPUModelRunner, _reserve_v2)


def _add_to_profile(runner_class: Any, reserve: Callable[[Any, torch.Tensor], None]) -> None:
    """Let `reserve(runner, hidden states of the sampled rows)` run after the sampler's dummy run.

    vLLM makes that run while it profiles, on the last pipeline rank and for models that generate, and holds the hidden
    states of a full batch meanwhile, as it does in a real step. The V1 runner repeats it after capturing CUDA graphs,
    so that its allocator already owns the memory.
    """
    _expect(runner_class, "_dummy_sampler_run", "self", "hidden_states")
    dummy_sampler_run = runner_class._dummy_sampler_run

    @torch.inference_mode()
    def dummy_sampler_run_then_reserve(self: Any, hidden_states: torch.Tensor) -> Any:
        output = dummy_sampler_run(self, hidden_states)
        if not self.vllm_config.is_mm_encoder_only:
            reserve(self, hidden_states)
        return output

    runner_class._dummy_sampler_run = dummy_sampler_run_then_reserve


def _reserve_v1(runner: Any, hidden_states: torch.Tensor, budget_bytes: int) -> None:
    rows = min(_rows_v1(runner, RESERVED_TOP, budget_bytes), runner.max_num_tokens)
    # A step still holds the logits that it sampled from when it comes to prompt logprobs.
    sampled_logits = runner.model.compute_logits(hidden_states)
    _chunk_v1(runner, *_dummy_rows(hidden_states, rows), RESERVED_TOP)
    del sampled_logits


def _reserve_v2(runner: Any, hidden_states: torch.Tensor) -> None:
    from vllm.v1.worker.gpu.sample import prompt_logprob

    dummy_states, targets = _dummy_rows(hidden_states, min(prompt_logprob.CHUNK_SIZE, runner.max_num_tokens))
    prompt_logprob.compute_prompt_logprobs_with_chunking(
        targets, dummy_states, runner.model.compute_logits, RESERVED_TOP, runner.model_config.logprobs_mode
    )


def _dummy_rows(hidden_states: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states [rows, hidden], target tokens [rows]), all zero: a dummy run may leave NaN in its own."""
    return (
        hidden_states.new_zeros((rows, hidden_states.shape[-1])),
        hidden_states.new_zeros(rows, dtype=torch.int64),
    )


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
    return rows_per_chunk(budget_bytes, row_bytes_v1(_logits_shape(runner), num_top))


def _logits_shape(runner: Any) -> LogitsShape:
    config = runner.model_config
    return LogitsShape(config.get_vocab_size(), config.head_dtype.itemsize, runner.parallel_config.tensor_parallel_size)


def _expect(owner: Any, name: str, *parameters: str) -> None:
    """Make sure that what is replaced still takes these parameters."""
    function = getattr(owner, name, None)
    if function is None or tuple(inspect.signature(function).parameters) != parameters:
        raise _changed(owner, name)


def _changed(owner: Any, name: str) -> RuntimeError:
    return RuntimeError(f"Scoremode patches {owner.__name__}.{name}, which is not as it was in the vLLM it pins")
