"""Extensions get the parts of their own requests in each step, around the forward passes of both model runners."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from scoremode_server.worker import runners
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import Sink, SinkMaker
from tests.unit.server.worker.kept_patches import set_back_at_end
from tests.unit.server.worker.linear_scorer import ALONE, make_scorer
from tests.unit.server.worker.test_runners import MEBIBYTE, VOCAB, Runner

OWN = RowSpec(sinks={"own": None})


class Maker(SinkMaker):
    """Notes the parts of each pass, and whether the model ran inside."""

    has_hooks = True

    def __init__(self) -> None:
        super().__init__(Sink)
        self.passes: list[list[tuple[str, int, int, int]]] = []
        self.is_open = False
        self.inside: list[bool] = []

    @contextmanager
    def around_forward(self, model: Any, parts: Any) -> Iterator[None]:
        self.passes.append([(part.request_id, part.position, part.row, part.num_tokens) for _, part in parts])
        self.is_open = True
        yield
        self.is_open = False


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A maker for runners that are patched anew, and whose passes note whether they are inside."""
    maker = Maker()
    set_back_at_end(monkeypatch)

    def note(*arguments: Any, **options: Any) -> None:
        maker.inside.append(maker.is_open)

    def execute(runner: Any, step: Any, dummy_run: bool = False) -> None:
        if not dummy_run:
            runner.prepare_inputs(step)
        note()

    monkeypatch.setattr(GPUModelRunner, "_model_forward", note)
    monkeypatch.setattr(GPUModelRunner, "_dummy_run", note)
    monkeypatch.setattr(GPUModelRunnerV2, "prepare_inputs", lambda runner, step: step)
    monkeypatch.setattr(GPUModelRunnerV2, "execute_model", execute)
    monkeypatch.setattr(runners, "get_tp_group", lambda: ALONE)
    runners.patch_v1(MEBIBYTE, {"own": maker})
    runners.patch_v2(MEBIBYTE, {"own": maker})
    return maker


@pytest.mark.parametrize(("is_eager", "num_stages"), [(True, 1), (False, 1), (True, 2)])
def test_v1_forward_passes_are_enclosed_where_the_model_is_eager_and_whole(
    maker: Maker, is_eager: bool, num_stages: int
):
    """In a pipeline all ranks but the last have no rows, and no LM head to compare with."""
    runner: Any = Runner({"one": [1] * 9, "own": [2] * 9}, {"one": 0, "own": 0})
    runner.model_config.enforce_eager = is_eager
    runner.parallel_config.pipeline_parallel_size = num_stages
    eager = is_eager and num_stages == 1
    runner.requests["own"].sampling_params.extra_args = OWN.as_extra_args()

    def forward(scheduled: dict[str, int]) -> None:
        runner.input_batch = SimpleNamespace(
            req_ids=list(scheduled), req_id_to_index={name: row for row, name in enumerate(scheduled)}
        )
        # A step of more requests came before.
        runner.query_start_loc = SimpleNamespace(np=np.array([*np.cumsum([0, *scheduled.values()]), 99, 99]))
        GPUModelRunner._model_forward(runner, input_ids=None)
        for name, count in scheduled.items():
            runner.requests[name].num_computed_tokens += count

    GPUModelRunner._dummy_run(runner, 1)
    forward({"one": 4, "own": 3})
    # As after the model has run.
    if eager:
        runner._scoremode_scorer.requests["own"].end = 3
    forward({"own": 6})
    assert maker.inside == [eager] * 3
    assert maker.passes == ([[], [("own", 0, 4, 3)], [("own", 3, 0, 6)]] if eager else [])


def test_v1_begins_a_request_once_in_a_step(maker: Maker):
    runner: Any = Runner({"own": [2] * 9}, {"own": 0})
    runner.requests["own"].num_computed_tokens = 2
    scorer = make_scorer(VOCAB, {"own": maker})
    runner.query_start_loc = SimpleNamespace(np=np.array([0, 4]))
    runner.input_batch = SimpleNamespace(req_id_to_index={"own": 0})
    runners.step_parts(runner, scorer, {"own": 4})
    sink = scorer.requests["own"]
    runners.step_parts(runner, scorer, {"own": 4})
    assert scorer.requests["own"] is sink


@pytest.mark.parametrize("eager", [True, False])
def test_v2_forward_passes_are_enclosed_where_the_model_is_eager(maker: Maker, eager: bool):
    worker = prompt_logprob.PromptLogprobsWorker(2, torch.device("cpu"))
    worker._scoremode_scorer = make_scorer(VOCAB, {"own": maker})
    worker.add_request("one", 0, SimpleNamespace(prompt_logprobs=0, extra_args=None, prompt_logprob_token_ids=None))
    worker._scoremode_scorer.begin("own", OWN)
    runner = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        prompt_logprobs_worker=worker,
        model=None,
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9, 9]))),
    )
    runner.prepare_inputs = lambda step: GPUModelRunnerV2.prepare_inputs(runner, step)
    step = SimpleNamespace(
        req_ids=["one", "own"],
        idx_mapping_np=np.array([0, 1]),
        num_computed_prefill_tokens_np=np.array([0, 3]),
        prefill_len_np=np.array([9, 9]),
        num_scheduled_tokens=np.array([4, 6]),
        query_start_loc_np=np.array([0, 4, 10]),
    )
    GPUModelRunnerV2.execute_model(runner, step, dummy_run=True)
    GPUModelRunnerV2.execute_model(runner, step)
    assert maker.inside == [eager] * 2
    assert maker.passes == ([[], [("own", 3, 4, 6)]] if eager else [])
    assert not maker.is_open
