"""The patched model runners: the replaced V1 method beside vLLM's own on the same made-up steps, and what V2 leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.kernels.working_memory import LogitsShape, block_bytes, row_bytes_v1
from scoremode_server.references.directory import ReferenceDirectory
from scoremode_server.vllm_patches import runner_v1, runner_v2
from scoremode_server.vllm_patches import windows as windows_module
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows, WindowMark
from scoremode_server.vllm_patches.scored_windows import ScoredWindows
from tests.unit.server.references.reference_setup import create
from tests.unit.server.vllm_patches.written import let_all_be_written

MEBIBYTE = 1024**2
STOCK = GPUModelRunner._get_prompt_logprobs_dict
VOCAB, HIDDEN = 128, 8
FLOAT32_SHAPE = LogitsShape(VOCAB, 4)
WIDEST_ROW = row_bytes_v1(FLOAT32_SHAPE, VOCAB)
BLOCK = block_bytes(FLOAT32_SHAPE)
"""What is held next to the rows."""


def test_the_second_runner_is_patched_as_it_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.sample import prompt_logprob

    for owner, name in (
        (RunnerV2, "load_model"),
        (prompt_logprob.PromptLogprobsWorker, "add_request"),
        (prompt_logprob.PromptLogprobsWorker, "remove_request"),
        (prompt_logprob.PromptLogprobsWorker, "compute_prompt_logprobs"),
        (RunnerV2, "_dummy_sampler_run"),
        (prompt_logprob, "CHUNK_SIZE"),
        (prompt_logprob, "compute_prompt_logprobs_with_chunking"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loaded = []
    monkeypatch.setattr(
        RunnerV2,
        "load_model",
        lambda self, load_dummy_weights=False, *args, model=None, **kwargs: loaded.append(self),
    )
    monkeypatch.setattr(RunnerV2, "_scoremode_windows", None, raising=False)
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    runner_v2.patch(256 * MEBIBYTE, windows)
    # There `ReferenceWorker` looks for them.
    assert RunnerV2._scoremode_windows is windows
    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 128_256, head_dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    RunnerV2.load_model(runner)
    assert loaded == [runner]
    assert prompt_logprob.CHUNK_SIZE == 512
    assert isinstance(prompt_logprob.compute_prompt_logprobs_with_chunking, runner_v2.PromptLogprobs)


@pytest.mark.parametrize(("num_top", "mode"), [(-1, "raw_logprobs"), (257, "raw_logprobs"), (0, "raw_logits")])
def test_vllm_computes_what_one_pass_does_not_give(num_top: int, mode: str):
    compute = runner_v2.PromptLogprobs(MEBIBYTE, lambda *arguments: arguments)
    arguments = (torch.zeros(2), torch.zeros(2, HIDDEN), lambda rows: rows, num_top, mode)
    assert compute(*arguments) == arguments


class Runner:
    """As much of a V1 model runner as prompt logprobs touch, with a random projection."""

    def __init__(self, prompts: dict[str, list[int] | None], num_top: dict[str, int], mode: str) -> None:
        weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(3))
        self.projected: list[int] = []

        def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            self.projected.append(len(hidden_states))
            return hidden_states @ weight

        self.model = SimpleNamespace(compute_logits=compute_logits)
        self.sampler = Sampler()
        self.model_config = SimpleNamespace(logprobs_mode=mode, get_vocab_size=lambda: VOCAB, head_dtype=torch.float32)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1)
        self.device = torch.device("cpu")
        self.num_prompt_logprobs = dict(num_top)
        self.requests = {name: _request(name, tokens) for name, tokens in prompts.items()}
        self.synchronized = 0

    def _sync_device(self) -> None:
        self.synchronized += 1

    def step(self, compute: Any, scheduled: dict[str, int], hidden_states: torch.Tensor) -> dict[str, Any]:
        """One step of vLLM's: prompt logprobs, then the computed tokens move on."""
        self.input_batch = SimpleNamespace(req_id_to_index={name: row for row, name in enumerate(scheduled)})
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *scheduled.values()]))
        results = compute(self, hidden_states, scheduled)
        for name, tokens in scheduled.items():
            self.requests[name].num_computed_tokens += tokens
        return results


def _request(name: str, tokens: list[int] | None) -> CachedRequestState:
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=(),
        num_computed_tokens=0,
        output_token_ids=[],
        prompt_embeds=None if tokens else torch.zeros(5, HIDDEN),
    )


STEPS = [
    {"whole": 20, "parts": 7, "embedded": 5},
    {"parts": 7, "long": 9},
    # Decoding steps of `whole`; `parts` and `exact` stop one token short of their ends, and have no rows in their last.
    {"whole": 1, "parts": 1, "long": 1},
    {"parts": 1, "exact": 11, "long": 4},
    {"exact": 1, "long": 13},
    {"short": 1, "long": 5, "parts": 1},
]
LENGTHS = {"whole": 20, "parts": 16, "exact": 12, "long": 32, "short": 1}


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunks_are_what_vllm_computes_at_once(mode: str, chunk: int):
    generator = torch.Generator().manual_seed(5)
    prompts: dict[str, list[int] | None] = {
        name: torch.randint(VOCAB, (length,), generator=generator).tolist() for name, length in LENGTHS.items()
    }
    num_top = {"whole": 0, "parts": 5, "exact": VOCAB, "long": 3, "short": 2, "embedded": 1}
    stock, ours = (Runner({**prompts, "embedded": None}, num_top, mode) for _ in range(2))

    def bounded(runner: Runner, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        return runner_v1.prompt_logprobs(runner, hidden_states, scheduled, BLOCK + chunk * WIDEST_ROW, ScoredWindows())

    finished = set()
    for scheduled in STEPS:
        hidden_states = torch.randn(sum(scheduled.values()), HIDDEN, generator=generator)
        expected, actual = stock.step(STOCK, scheduled, hidden_states), ours.step(bounded, scheduled, hidden_states)
        assert actual.keys() == expected.keys()
        finished |= actual.keys()
        for name, tensors in actual.items():
            _same(tensors, expected[name])
    assert finished == LENGTHS.keys()
    assert ours.num_prompt_logprobs == stock.num_prompt_logprobs == {"embedded": 1}
    assert ours.synchronized == stock.synchronized
    assert all(request.in_progress_prompt_logprobs_cpu is None for request in ours.requests.values())


def _same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.selected_token_ranks, expected.selected_token_ranks)
    assert torch.equal(actual.logprob_token_ids, expected.logprob_token_ids)
    assert torch.allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_no_chunk_has_more_rows_than_the_budget():
    runner = Runner({"one": [1] * 50}, {"one": 0}, "raw_logprobs")
    runner.step(
        lambda *step: runner_v1.prompt_logprobs(*step, BLOCK + 7 * row_bytes_v1(FLOAT32_SHAPE, 0), ScoredWindows()),
        {"one": 50},
        torch.zeros(50, HIDDEN),
    )
    assert runner.projected == [7] * 7


def test_rows_from_the_prefix_cache_are_not_numbers():
    runner = Runner({"one": [1] * 10}, {"one": 0}, "raw_logprobs")
    runner.requests["one"].num_computed_tokens = 4
    results = runner.step(
        lambda *step: runner_v1.prompt_logprobs(*step, MEBIBYTE, ScoredWindows()), {"one": 6}, torch.zeros(6, HIDDEN)
    )
    assert results["one"].logprobs.isnan().squeeze(1).tolist() == [True] * 4 + [False] * 5


def test_profiling_computes_one_chunk():
    runner = Runner({}, {}, "raw_logprobs")
    runner.max_num_tokens = 64
    sampled = torch.zeros(4, HIDDEN)
    runner_v1.reserve(runner, sampled, BLOCK + 9 * row_bytes_v1(FLOAT32_SHAPE), ScoredWindows())
    runner_v1.reserve(runner, sampled, 256 * MEBIBYTE, ScoredWindows())
    assert runner.projected == [4, 9, 4, 64]


WINDOW_LENGTHS = {"window": 9, "ordinary": 10}
WINDOW_STEPS = [
    {"window": 3, "ordinary": 5},
    # Preempted, and begun again.
    {"ordinary": 2},
    {"window": 5},
    {"ordinary": 3, "window": 4},
]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_windows_and_ordinary_requests_in_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    for module in (runner_v1, windows_module):
        monkeypatch.setattr(module, "get_tp_group", lambda: alone)
    generator = torch.Generator().manual_seed(5)
    prompts = {
        name: torch.randint(VOCAB, (length,), generator=generator).tolist() for name, length in WINDOW_LENGTHS.items()
    }
    states = {name: torch.randn(length, HIDDEN, generator=generator) for name, length in WINDOW_LENGTHS.items()}
    runner = Runner(prompts, {"window": 0, "ordinary": 0}, "raw_logprobs")
    reference, windows = create(tmp_path), ReferenceWindows(ReferenceDirectory(tmp_path))
    mark = WindowMark("record", "base", "one", 2, first=4, num_scored=6, last_token=17)
    runner.requests["window"].sampling_params = SamplingParams(extra_args=mark.as_extra_args())

    def compute(runner: Runner, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        return runner_v1.prompt_logprobs(runner, hidden_states, scheduled, BLOCK + chunk * WIDEST_ROW, windows)

    results: dict[str, Any] = {}
    for scheduled in WINDOW_STEPS:
        if "window" not in scheduled:
            runner.requests["window"].num_computed_tokens = 0
        of_step = [
            states[name][(start := runner.requests[name].num_computed_tokens) : start + count]
            for name, count in scheduled.items()
        ]
        results |= runner.step(compute, scheduled, torch.cat(of_step))
    assert results.keys() == WINDOW_LENGTHS.keys()
    assert not windows._windows
    let_all_be_written(windows)
    weight = runner.model.compute_logits(torch.eye(HIDDEN))
    for name, first, targets in (("ordinary", 1, prompts["ordinary"][1:]), ("window", 4, [*prompts["window"][4:], 17])):
        logits = states[name][first - 1 : first - 1 + len(targets)] @ weight
        expected = logits.log_softmax(1).gather(1, torch.tensor(targets)[:, None])
        assert torch.allclose(results[name].logprobs, expected, rtol=0, atol=1e-5)
    hidden_states, logprobs = reference.read_shard(2)
    assert torch.equal(hidden_states, states["window"][3:])
    assert torch.equal(logprobs, results["window"].logprobs[:, 0])


def test_windows_of_requests_that_have_ended_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner_v1, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    create(tmp_path)
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    runner = Runner({"window": [1] * 9}, {"window": 0}, "raw_logprobs")
    mark = WindowMark("record", "base", "one", 0, first=1, num_scored=9, last_token=17)
    runner.requests["window"].sampling_params = SamplingParams(extra_args=mark.as_extra_args())

    def compute(runner: Runner, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        return runner_v1.prompt_logprobs(runner, hidden_states, scheduled, MEBIBYTE, windows)

    runner.step(compute, {"window": 5}, torch.zeros(5, HIDDEN))
    assert windows.get("window") is not None
    del runner.requests["window"], runner.num_prompt_logprobs["window"]
    runner.step(compute, {}, torch.zeros(0, HIDDEN))
    assert windows.get("window") is None


def test_prompt_logprobs_are_made_before_drafts(monkeypatch: pytest.MonkeyPatch):
    """A drafter's CUDA graph overwrites the hidden states of the step."""

    def draft_then_bookkeep(self: Any, grammar_output: Any) -> Any:
        state, self.execute_model_state = self.execute_model_state, None
        state.hidden_states.zero_()
        return GPUModelRunner._get_prompt_logprobs_dict(
            self, state.hidden_states, state.scheduler_output.num_scheduled_tokens
        )

    for name in ("_get_prompt_logprobs_dict", "_dummy_sampler_run"):
        monkeypatch.setattr(GPUModelRunner, name, getattr(GPUModelRunner, name))
    monkeypatch.setattr(GPUModelRunner, "_scoremode_windows", None, raising=False)
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", draft_then_bookkeep)
    runner_v1.patch(MEBIBYTE, ScoredWindows())

    def sample(runner: Runner, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        schedule = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
        runner.execute_model_state = SimpleNamespace(scheduler_output=schedule, hidden_states=hidden_states)
        return GPUModelRunner.sample_tokens(runner, None)

    runner, stock = (Runner({"one": list(range(20))}, {"one": 3}, "raw_logprobs") for _ in range(2))
    runner.speculative_config = SimpleNamespace()
    # A step's buffer is longer than what is scheduled.
    hidden_states = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = stock.step(STOCK, {"one": 20}, hidden_states[:20].clone())
    _same(runner.step(sample, {"one": 20}, hidden_states)["one"], expected["one"])
