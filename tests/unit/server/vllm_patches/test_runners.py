"""The patched V1 model runner: the replaced method next to vLLM's own on the same made-up steps."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.vllm_patches import runners
from scoremode_server.vllm_patches.row_scorer import RowScorer
from scoremode_server.vllm_patches.row_spec import RowSpec
from tests.unit.server.vllm_patches.linear_scorer import ALONE, make_scorer

MEBIBYTE = 1024**2
STOCK = GPUModelRunner._get_prompt_logprobs_dict
VOCAB, HIDDEN = 128, 8


def computing(scorer: RowScorer) -> Any:
    """What the patch puts in the place of vLLM's method."""
    return lambda runner, states, scheduled: runners.prompt_logprobs(runner, scorer, states, scheduled)


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
        self.requests = {name: _request(name, tokens, num_top.get(name)) for name, tokens in prompts.items()}
        self.synchronized = 0

    def _sync_device(self) -> None:
        self.synchronized += 1

    def preempt(self, names: Iterable[str]) -> None:
        for name in names:
            self.requests[name].num_computed_tokens = 0

    def step(self, compute: Any, scheduled: dict[str, int], hidden_states: torch.Tensor) -> dict[str, Any]:
        """One step of vLLM's: prompt logprobs, then the computed tokens move on."""
        self.input_batch = SimpleNamespace(req_id_to_index={name: row for row, name in enumerate(scheduled)})
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *scheduled.values()]))
        results = compute(self, hidden_states, scheduled)
        for name, tokens in scheduled.items():
            self.requests[name].num_computed_tokens += tokens
        return results


def _request(name: str, tokens: list[int] | None, num_top: int | None) -> CachedRequestState:
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=SamplingParams(prompt_logprobs=num_top),
        generator=None,
        block_ids=(),
        num_computed_tokens=0,
        output_token_ids=[],
        prompt_embeds=None if tokens else torch.zeros(5, HIDDEN),
    )


STEPS = [
    {"whole": 20, "parts": 7, "embedded": 5},
    {"parts": 7, "long": 9, "again": 6},
    # Decoding steps of `whole`; `parts` and `exact` stop one token short of their ends, and have no rows in their last.
    {"whole": 1, "parts": 1, "long": 1},
    {"parts": 1, "exact": 11, "long": 4, "again": 5},
    {"exact": 1, "long": 13},
    {"short": 1, "long": 5, "parts": 1, "again": 4},
]
PREEMPTED = {"again": 3}
"""Before which step."""
LENGTHS = {"whole": 20, "parts": 16, "exact": 12, "long": 32, "short": 1, "again": 9}


@pytest.mark.parametrize(("mode", "chunk"), [("raw_logprobs", 1), ("raw_logprobs", 7), ("raw_logits", 1000)])
def test_chunks_are_what_vllm_computes_at_once(mode: str, chunk: int):
    generator = torch.Generator().manual_seed(5)
    prompts: dict[str, list[int] | None] = {
        name: torch.randint(VOCAB, (length,), generator=generator).tolist() for name, length in LENGTHS.items()
    }
    num_top = {"whole": 0, "parts": 5, "exact": VOCAB, "long": 3, "short": 2, "embedded": 1, "again": 0}
    stock, ours = (Runner({**prompts, "embedded": None}, num_top, mode) for _ in range(2))
    bounded = computing(make_scorer(VOCAB, chunk=chunk, mode=mode))
    finished = set()
    for number, scheduled in enumerate(STEPS):
        for runner in (stock, ours):
            runner.preempt(name for name, before in PREEMPTED.items() if before == number)
        hidden_states = torch.randn(sum(scheduled.values()), HIDDEN, generator=generator)
        expected, actual = stock.step(STOCK, scheduled, hidden_states), ours.step(bounded, scheduled, hidden_states)
        # A prompt of one token has no rows.
        assert actual.keys() == expected.keys() - {"short"}
        finished |= actual.keys()
        for name, tensors in actual.items():
            _same(tensors, expected[name])
    assert finished == LENGTHS.keys() - {"short"}
    assert ours.num_prompt_logprobs == stock.num_prompt_logprobs == {"embedded": 1}
    assert ours.synchronized == stock.synchronized


def _same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.selected_token_ranks, expected.selected_token_ranks)
    assert torch.equal(actual.logprob_token_ids, expected.logprob_token_ids)
    assert torch.allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", [None, RowSpec()])
def test_rows_from_the_prefix_cache_are_left_out_or_not_numbers(spec: RowSpec | None):
    """vLLM's own requests get a row for each token, as from vLLM's own method."""
    runner = Runner({"one": [1] * 10}, {"one": 0}, "raw_logprobs")
    runner.requests["one"].num_computed_tokens = 4
    runner.requests["one"].sampling_params.extra_args = spec and spec.as_extra_args()
    results = runner.step(computing(make_scorer(VOCAB)), {"one": 6}, torch.zeros(6, HIDDEN))
    expected = [False] * 5 if spec else [True] * 4 + [False] * 5
    assert results["one"].logprobs.isnan().squeeze(1).tolist() == expected


def test_rows_of_requests_that_have_ended_are_dropped():
    scorer, runner = make_scorer(VOCAB), Runner({"one": [1] * 9}, {"one": 0}, "raw_logprobs")
    runner.step(computing(scorer), {"one": 5}, torch.zeros(5, HIDDEN))
    assert "one" in scorer.requests
    del runner.requests["one"], runner.num_prompt_logprobs["one"]
    runner.step(computing(scorer), {}, torch.zeros(0, HIDDEN))
    assert not scorer.requests


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
    monkeypatch.setattr(runners, "get_tp_group", lambda: ALONE)
    runners.patch_v1(MEBIBYTE, None)

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
