"""The patched model runners on made-up steps: V1's next to vLLM's own method, V2's next to float64."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.worker import runners
from scoremode_server.worker.row_scorer import RowScorer
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import SinkMaker
from tests.unit.server.worker.kept_patches import set_back_at_end
from tests.unit.server.worker.linear_scorer import ALONE, check_rows, make_scorer, rows_of

MEBIBYTE = 1024**2
STOCK = GPUModelRunner._get_prompt_logprobs_dict
VOCAB, HIDDEN = 128, 8


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """vLLM counts ranks in a compiled function, and compiling takes longer than all tests here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def computing(scorer: RowScorer) -> Any:
    """The method with which the patch replaces vLLM's."""
    return lambda runner, states, scheduled: runners.prompt_logprobs(runner, scorer, states, scheduled)


class Runner:
    """As much of a V1 model runner as prompt logprobs touch, with a random projection."""

    def __init__(self, prompts: dict[str, list[int] | None], num_top: dict[str, int]) -> None:
        weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(3))
        self.model = SimpleNamespace(compute_logits=lambda hidden_states: hidden_states @ weight)
        self.sampler = Sampler()
        model = {"get_vocab_size": lambda: VOCAB, "head_dtype": torch.float32}
        self.model_config = SimpleNamespace(logprobs_mode="raw_logprobs", **model)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
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


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_are_what_vllm_computes_at_once(chunk: int):
    generator = torch.Generator().manual_seed(5)
    prompts: dict[str, list[int] | None] = {
        name: torch.randint(VOCAB, (length,), generator=generator).tolist() for name, length in LENGTHS.items()
    }
    num_top = {"whole": 0, "parts": 5, "exact": VOCAB, "long": 3, "short": 2, "embedded": 1, "again": 0}
    stock, ours = (Runner({**prompts, "embedded": None}, num_top) for _ in range(2))
    bounded = computing(make_scorer(VOCAB, chunk=chunk))
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
def test_rows_from_the_prefix_cache_are_left_out(spec: RowSpec | None):
    """This holds for vLLM's own requests too, as on its V2 runner."""
    runner = Runner({"one": [1] * 10}, {"one": 0})
    runner.requests["one"].num_computed_tokens = 4
    runner.requests["one"].sampling_params.extra_args = spec and spec.as_extra_args()
    results = runner.step(computing(make_scorer(VOCAB)), {"one": 6}, torch.zeros(6, HIDDEN))
    assert np.isnan(rows_of(results["one"], spec or RowSpec(is_packed=False)).logprobs[:, 0]).tolist() == [False] * 5


def test_rows_of_requests_that_have_ended_are_dropped():
    scorer, runner = make_scorer(VOCAB), Runner({"one": [1] * 9}, {"one": 0})
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

    set_back_at_end(monkeypatch)
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", draft_then_bookkeep)
    monkeypatch.setattr(runners, "get_tp_group", lambda: ALONE)
    runners.patch_v1(MEBIBYTE, {})

    def sample(runner: Runner, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        schedule = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
        runner.execute_model_state = SimpleNamespace(scheduler_output=schedule, hidden_states=hidden_states)
        return GPUModelRunner.sample_tokens(runner, None)

    runner, stock = (Runner({"one": list(range(20))}, {"one": 3}) for _ in range(2))
    runner.speculative_config = SimpleNamespace()
    # A step's buffer is longer than what is scheduled.
    hidden_states = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = stock.step(STOCK, {"one": 20}, hidden_states[:20].clone())
    _same(runner.step(sample, {"one": 20}, hidden_states)["one"], expected["one"])


# The V2 runner: which rows of a step are whose, and what is left to vLLM

CPU = torch.device("cpu")
LENGTHS_V2 = {"ordinary": 12, "scored": 9, "other": 7, "plain": 3, "short": 2}
"""Tokens that are fed; of `scored` there is one more, which is not."""
CHOSEN = np.array([2, 40], np.int32)
SCORED = RowSpec(4, 51, 2, 0.5, len(CHOSEN), CHOSEN.tobytes())
TOPS = {"ordinary": 4, "other": 0, "short": 1}
STEPS_V2 = [
    {"scored": 3, "ordinary": 5, "plain": 3},
    {"ordinary": 4, "scored": 2},
    {"other": 7, "scored": 4, "ordinary": 3, "short": 2},
    # Decoding.
    {"ordinary": 1, "other": 1},
]


def token_ids(num_tokens: int, starts: torch.Tensor, mapping: torch.Tensor, computed: torch.Tensor, tokens: Any) -> Any:
    """vLLM's kernel in PyTorch: the token after each."""
    result = torch.zeros(num_tokens, dtype=torch.int64)
    for place, index in enumerate(mapping.tolist()):
        for position in range(int(starts[place]), int(starts[place + 1])):
            target = int(computed[index]) + 1 + position - int(starts[place])
            result[position] = tokens[index, min(target, tokens.shape[1] - 1)]
    return result


class Engine:
    """As much of the V2 runner as calls prompt logprobs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(HIDDEN, VOCAB, generator=generator)
        # And placeholders for drafts.
        self.states = {
            name: torch.randn(length + 3, HIDDEN, generator=generator) for name, length in LENGTHS_V2.items()
        }
        self.tokens = torch.randint(VOCAB, (len(LENGTHS_V2), 14), generator=generator).int()
        self.worker = prompt_logprob.PromptLogprobsWorker(len(LENGTHS_V2), CPU)
        self.worker._scoremode_scorer = make_scorer(VOCAB, chunk=6)
        self.num_projected: list[int] = []
        self.computed = dict.fromkeys(LENGTHS_V2, 0)
        self.prefill = dict(LENGTHS_V2)
        for name in LENGTHS_V2:
            self.add(name)

    def add(self, name: str) -> None:
        self.computed[name] = 0
        params = SamplingParams(prompt_logprobs=TOPS.get(name))
        if name == "scored":
            params = SamplingParams(prompt_logprobs=0, extra_args=SCORED.as_extra_args())
        self.worker.add_request(name, list(LENGTHS_V2).index(name), params)

    def step(self, scheduled: dict[str, int], *, samples: bool = False) -> dict[str, Any]:
        """One step, with the logits that its sampler got if it `samples`."""
        names, indices = list(scheduled), [list(LENGTHS_V2).index(name) for name in scheduled]
        starts = np.cumsum([0, *scheduled.values()])
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=np.array(indices),
            num_computed_prefill_tokens_np=np.array([min(self.computed[name], self.prefill[name]) for name in names]),
            prefill_len_np=np.array([self.prefill[name] for name in names]),
            num_scheduled_tokens=np.array(list(scheduled.values())),
            num_reqs=len(names),
            num_tokens=int(starts[-1]),
            query_start_loc=torch.tensor(starts),
            query_start_loc_np=starts,
        )
        hidden = [
            self.states[name][(start := self.computed[name]) : start + count] for name, count in scheduled.items()
        ]
        if samples:
            batch._scoremode_logits = torch.cat([each[-1:] for each in hidden]) @ self.weight
        results = self.worker.compute_prompt_logprobs(
            self.project,
            # The runner's buffer is longer than the step.
            torch.cat((*hidden, torch.full((5, HIDDEN), torch.nan))),
            batch,
            self.tokens,
            torch.tensor(list(self.computed.values())),
            np.array(list(LENGTHS_V2.values())),
        )
        for name, count in scheduled.items():
            self.computed[name] += count
        return results

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_projected.append(len(rows))
        return rows @ self.weight

    def check(self, results: dict[str, Any]) -> None:
        assert not self.worker._scoremode_scorer.requests.keys() & results.keys()
        for name, rows in results.items():
            own = RowSpec(num_top=TOPS.get(name, 0), is_packed=False)
            spec, length = SCORED if name == "scored" else own, LENGTHS_V2[name]
            targets = self.tokens[list(LENGTHS_V2).index(name), spec.first : length].tolist()
            targets += [] if spec.last_token is None else [spec.last_token]
            check_rows(
                rows_of(rows, spec), spec, self.states[name][spec.first - 1 :][: len(targets)] @ self.weight, targets
            )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", token_ids)
    set_back_at_end(monkeypatch)
    runners._patch_worker(prompt_logprob.PromptLogprobsWorker)
    return Engine()


def test_specifications_and_ordinary_requests_in_one_batch(engine: Engine):
    results: dict[str, Any] = {}
    for step in STEPS_V2:
        finished = engine.step(step)
        assert not finished.keys() & results.keys()
        results |= finished
    assert results.keys() == LENGTHS_V2.keys() - {"plain"}
    engine.check(results)


def test_a_lane_takes_the_logits_that_its_step_sampled_from(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Unless the step has other rows too, which vLLM may change before it samples."""
    monkeypatch.setitem(globals(), "SCORED", replace(SCORED, chunk=1))
    engine.worker._scoremode_scorer.waiting.max_bytes = MEBIBYTE
    engine.add("scored")
    engine.step({"scored": 4})
    engine.step({"scored": 1, "short": 1})
    engine.num_projected.clear()
    for _ in range(2):
        assert not engine.step({"scored": 1}, samples=True)
    assert not engine.num_projected
    engine.step({"scored": 1, "short": 1}, samples=True)
    assert engine.num_projected == [1]
    engine.check(engine.step({"scored": 1}, samples=True))


@pytest.mark.parametrize(
    ("num_tokens", "max_bytes", "is_kept"), [(2, 24, True), (3, 24, False), (2, 23, False)], ids=str
)
def test_a_sampler_leaves_its_logits_with_the_batch(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, max_bytes: int, is_kept: bool
):
    """If they are all that a step needs, and can wait: what is left stays until the step's end."""
    monkeypatch.setattr(SamplerV2, "__call__", lambda self, logits, input_batch: logits.sum())
    monkeypatch.setattr(runners, "_waiting_bytes", lambda budget_bytes, device: max_bytes)
    set_back_at_end(monkeypatch)
    runners.patch_v2(256 * MEBIBYTE, {})
    logits, batch = torch.ones(2, 3), SimpleNamespace(num_reqs=2, num_tokens=num_tokens)
    assert SamplerV2.__call__(SimpleNamespace(), logits, batch) == 6
    assert hasattr(batch, "_scoremode_logits") == is_kept


@pytest.mark.parametrize(("has_head", "is_encoder"), [(True, False), (False, False), (True, True)])
def test_all_that_vllm_profiles_runs_next_to_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, has_head: bool, is_encoder: bool
):
    allocated, empty = [], torch.empty
    set_back_at_end(monkeypatch)
    monkeypatch.setattr(GPUModelRunnerV2, "profile_run", lambda self: allocated.append("profiled"))
    monkeypatch.setattr(runners, "_waiting_bytes", lambda budget_bytes, device: budget_bytes // 4)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: allocated.append(size) or empty(*size, **options))
    monkeypatch.setattr(runners, "get_pp_group", lambda: SimpleNamespace(is_last_rank=has_head))
    monkeypatch.setattr(runners, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    maker = SimpleNamespace(allocate=lambda config, device: allocated.append(device))
    runners.patch_v2(256, cast(dict[str, SinkMaker], {"kept": maker}))
    model, config = SimpleNamespace(runner_type="generate"), SimpleNamespace(is_mm_encoder_only=is_encoder)
    GPUModelRunnerV2.profile_run(SimpleNamespace(device=CPU, model_config=model, vllm_config=config))
    assert allocated == [(64,), *([CPU] if has_head and not is_encoder else []), "profiled"]


def test_a_preempted_request_starts_again_unless_its_prompt_was_over(engine: Engine):
    assert not engine.step({"scored": 6})
    engine.worker.remove_request("scored")
    assert "scored" not in engine.worker._scoremode_scorer.requests
    engine.add("scored")
    assert not engine.step({"scored": 2})
    engine.check(found := engine.step({"scored": 7}))
    assert found.keys() == {"scored"}
    # vLLM does not return prompt logprobs twice either.
    engine.prefill["other"] += 1
    assert not engine.step({"other": 8})


@pytest.mark.parametrize("first_step", [{}, {"other": 6, "short": 1, "scored": 8}], ids=["whole", "one token left"])
def test_placeholders_for_drafts_have_no_rows(engine: Engine, first_step: dict[str, int]):
    """vLLM adds them to a prompt of which one token is left."""
    results = engine.step(first_step) if first_step else {}
    results |= engine.step(
        {name: LENGTHS_V2[name] - first_step.get(name, 0) + 3 for name in ("other", "short", "scored")}
    )
    engine.check(results)
    assert results.keys() == {"other", "short", "scored"}


def test_the_patch_replaces_what_is_pinned(monkeypatch: pytest.MonkeyPatch):
    worker_class = prompt_logprob.PromptLogprobsWorker
    set_back_at_end(monkeypatch)
    loaded = []
    monkeypatch.setattr(GPUModelRunnerV2, "load_model", lambda self, **options: loaded.append(self))
    monkeypatch.setattr(runners, "get_tp_group", lambda: ALONE)
    sinks: dict[str, Any] = {}
    runners.patch_v2(256 * MEBIBYTE, sinks)
    # `ReferenceWorker` looks for its own there.
    assert GPUModelRunnerV2._scoremode_sinks is sinks
    model = SimpleNamespace(get_vocab_size=lambda: 128_256, head_dtype=torch.bfloat16, logprobs_mode="raw_logprobs")
    # The last pipeline rank, and another.
    for worker in (worker_class(1, CPU), None):
        parallel = SimpleNamespace(tensor_parallel_size=1)
        runner = SimpleNamespace(model_config=model, parallel_config=parallel, prompt_logprobs_worker=worker)
        GPUModelRunnerV2.load_model(runner)
        assert loaded.pop() is runner
        assert prompt_logprob.CHUNK_SIZE == 512
        assert worker is None or worker._scoremode_scorer.budget_bytes == 256 * MEBIBYTE
