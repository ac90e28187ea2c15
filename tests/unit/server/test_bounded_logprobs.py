"""Rows per chunk, worked out by hand; and the replaced V1 method beside vLLM's own, on the same made-up steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.engine import bounded_logprobs, runner_v2
from scoremode_server.engine.logits_memory import (
    LogitsShape,
    row_bytes_fused,
    row_bytes_v1,
    row_bytes_v2,
    rows_per_chunk,
)

MEBIBYTE = 1024**2
STOCK = GPUModelRunner._get_prompt_logprobs_dict
VOCAB, HIDDEN = 128, 8
FLOAT32_SHAPE = LogitsShape(VOCAB, 4)
WIDEST_ROW = row_bytes_v1(FLOAT32_SHAPE, VOCAB)


@pytest.mark.parametrize(
    ("shape", "v1", "v2"),
    [
        # 128,256 entries, bfloat16. V1: 2 logits + 4 float32 copy + 4 logprobs. V2: 2 logits, and 2 after capping.
        # 588 bytes of results for 20 likeliest tokens and the actual one.
        (LogitsShape(128_256, 2), 128_256 * 10 + 588, 128_256 * 4 + 588),
        (LogitsShape(262_144, 2), 262_144 * 10 + 588, 262_144 * 4 + 588),
        # float32: V1 needs no copy.
        (LogitsShape(128_256, 4), 128_256 * 8 + 588, 128_256 * 8 + 588),
        # Two ranks, bfloat16: half a row, a row gathered, a row in order.
        (LogitsShape(128_256, 2, 2), 128_256 * 10 + 588, 128_256 * 5 + 588),
        # Two ranks, float32: gathering is the V1 runner's peak too.
        (LogitsShape(128_256, 4, 2), 128_256 * 10 + 588, 128_256 * 10 + 588),
        # 50,257 is padded to 50,304.
        (LogitsShape(50_257, 2), 50_304 * 10 + 588, 50_304 * 4 + 588),
    ],
)
def test_bytes_of_a_row(shape: LogitsShape, v1: int, v2: int):
    assert row_bytes_v1(shape) == v1
    assert row_bytes_v2(shape) == v2


@pytest.mark.parametrize(
    ("shape", "num_top", "copies", "sharded", "expected"),
    [
        # 128,256 entries, bfloat16, once; 28 bytes of results for the actual token.
        (LogitsShape(128_256, 2), 0, 1, False, 128_256 * 2 + 28),
        (LogitsShape(128_256, 2), 1, 1, False, 128_256 * 2 + 56),
        # 1,024 lanes with 16 tiles of 8 entries: their maxima, and 20 lanes' entries, in float32.
        (LogitsShape(128_256, 2), 20, 1, False, 128_256 * 2 + 588 + (1024 + 20 * 128) * 4),
        (LogitsShape(128_256, 2), 0, 2, False, 128_256 * 4 + 28),
        (LogitsShape(128_256, 2), 0, None, False, 128_256 * 4 + 28),
        # Two ranks: gathered as ever, or half a row each.
        (LogitsShape(128_256, 2, 2), 0, 1, False, 128_256 * 5 + 28),
        (LogitsShape(128_256, 2, 2), 0, 1, True, 128_256 + 28),
        (LogitsShape(128_256, 4, 4), 0, 2, True, 128_256 * 2 + 28),
    ],
)
def test_bytes_of_a_row_that_is_read_once(shape, num_top: int, copies: int | None, sharded: bool, expected: int):
    assert row_bytes_fused(shape, num_top, copies, sharded) == expected


@pytest.mark.parametrize(
    ("budget", "row_bytes", "rows"),
    [
        (256 * MEBIBYTE, 128_256 * 4 + 588, 512),  # 522 fit: four whole tiles
        (256 * MEBIBYTE, 262_144 * 4 + 588, 128),  # 255 fit
        (256 * MEBIBYTE, 262_144 * 10 + 588, 102),
        (1000, 10, 100),
        (1290, 10, 128),
        (2570, 10, 256),
        (99, 10, 9),
        (10, 10, 1),
        (1, 10, 1),
    ],
)
def test_rows_within_a_budget(budget: int, row_bytes: int, rows: int):
    assert rows_per_chunk(budget, row_bytes) == rows


def test_the_budget_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("SCOREMODE_LOGPROB_BYTES", raising=False)
    assert bounded_logprobs.budget_from_environment() == 256 * MEBIBYTE
    monkeypatch.setenv("SCOREMODE_LOGPROB_BYTES", "1048576")
    assert bounded_logprobs.budget_from_environment() == MEBIBYTE


@pytest.mark.parametrize("setting", ["256M", "-1", "", "0"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(monkeypatch, setting: str):
    monkeypatch.setenv("SCOREMODE_LOGPROB_BYTES", setting)
    with pytest.raises(ValueError, match=r"bytes|positive"):
        bounded_logprobs.install()


@pytest.mark.parametrize("method", ["_get_prompt_logprobs_dict", "_dummy_sampler_run"])
def test_a_method_that_changed_is_refused(method: str):
    class Runner:
        def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens): ...

        def _dummy_sampler_run(self, hidden_states): ...

    def changed(self, hidden_states, something_new): ...

    setattr(Runner, method, changed)
    with pytest.raises(RuntimeError, match=f"Runner.{method}"):
        bounded_logprobs._patch_v1(Runner, MEBIBYTE)


def test_the_second_runner_is_patched_as_it_is_pinned(monkeypatch):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.sample import prompt_logprob

    for owner, name in (
        (RunnerV2, "load_model"),
        (RunnerV2, "_dummy_sampler_run"),
        (prompt_logprob, "CHUNK_SIZE"),
        (prompt_logprob, runner_v2.COMPUTE),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loaded = []
    monkeypatch.setattr(
        RunnerV2,
        "load_model",
        lambda self, load_dummy_weights=False, *args, model=None, **kwargs: loaded.append(self),
    )
    runner_v2.patch(256 * MEBIBYTE)
    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 128_256, head_dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    RunnerV2.load_model(runner)
    assert loaded == [runner]
    assert prompt_logprob.CHUNK_SIZE == 512
    assert isinstance(getattr(prompt_logprob, runner_v2.COMPUTE), runner_v2.PromptLogprobs)


@pytest.mark.parametrize(("num_top", "mode"), [(-1, "raw_logprobs"), (65, "raw_logprobs"), (0, "raw_logits")])
def test_what_one_pass_does_not_give_is_left_to_vllm(num_top: int, mode: str):
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
        return bounded_logprobs._prompt_logprobs_v1(runner, hidden_states, scheduled, chunk * WIDEST_ROW)

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
        lambda *step: bounded_logprobs._prompt_logprobs_v1(*step, 7 * row_bytes_v1(FLOAT32_SHAPE, 0)),
        {"one": 50},
        torch.zeros(50, HIDDEN),
    )
    assert runner.projected == [7] * 7


def test_rows_from_the_prefix_cache_are_not_numbers():
    runner = Runner({"one": [1] * 10}, {"one": 0}, "raw_logprobs")
    runner.requests["one"].num_computed_tokens = 4
    results = runner.step(
        lambda *step: bounded_logprobs._prompt_logprobs_v1(*step, MEBIBYTE), {"one": 6}, torch.zeros(6, HIDDEN)
    )
    assert results["one"].logprobs.isnan().squeeze(1).tolist() == [True] * 4 + [False] * 5


def test_profiling_computes_one_chunk():
    runner = Runner({}, {}, "raw_logprobs")
    runner.max_num_tokens = 64
    sampled = torch.zeros(4, HIDDEN)
    bounded_logprobs._reserve_v1(runner, sampled, 9 * row_bytes_v1(FLOAT32_SHAPE))
    bounded_logprobs._reserve_v1(runner, sampled, 256 * MEBIBYTE)
    assert runner.projected == [4, 9, 4, 64]
