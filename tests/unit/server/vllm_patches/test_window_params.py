"""Marks of windows: ours reach the engine, and nobody else can set one."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.pooling_params import PoolingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from scoremode_server.prefix_cache.run import score_params
from scoremode_server.vllm_patches.output_processor import ScoringParams
from scoremode_server.vllm_patches.reference_windows import MARK, WindowMark, find_mark
from scoremode_server.vllm_patches.window_params import WindowParams, call_workers, guard_marks

WINDOW = WindowMark("compare", "base", "identity", 3, first=4, num_scored=6, last_token=17, num_top=2)
FORGED = {"extra_args": WINDOW.as_extra_args()}


def guarded_engine() -> Any:
    async def add_request(request_id: str, prompt: Any, params: Any, priority: int = 0) -> tuple[Any, ...]:
        return request_id, prompt, params, priority

    engine = SimpleNamespace(add_request=add_request)
    guard_marks(engine)
    return engine


def test_a_mark_reaches_the_worker_as_it_is():
    """The engine's processes get the fields, and none of our types."""
    params = WindowParams.mark(score_params([5, 6, 7]), WINDOW)
    sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert type(sent) is SamplingParams
    assert find_mark(sent) == WINDOW


def test_a_marked_request_has_no_row_for_its_sampled_token():
    scored = score_params([5, 6, 7])
    params = WindowParams.mark(scored, WINDOW)
    changed = {name for name in params.__struct_fields__ if getattr(params, name) != getattr(scored, name)}
    assert changed == {"logprobs", "extra_args"}
    assert params.logprobs is None
    assert scored.extra_args is None


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"other": 1}), PoolingParams()])
def test_other_requests_have_no_mark(params: Any):
    params = SimpleNamespace(extra_args=None) if isinstance(params, PoolingParams) else params
    assert find_mark(params) is None


async def test_marks_of_ours_pass_also_in_copies():
    params = WindowParams.mark(score_params([5, 6, 7]), WINDOW)
    for passed in (params, copy(params), params.clone()):
        assert isinstance(passed, WindowParams)
        assert find_mark(passed) == WINDOW
        assert await guarded_engine().add_request("id", "prompt", passed, priority=2) == ("id", "prompt", passed, 2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(**FORGED),
        ScoringParams(**FORGED),
        SamplingParams(extra_args={MARK: None}),
        SamplingParams(extra_args={MARK: {}, "other": 1}),
        ScoringParams.of(WindowParams.mark(score_params([5, 6, 7]), WINDOW)),
    ],
)
async def test_forged_marks_are_refused(params: SamplingParams):
    with pytest.raises(ValueError, match=f"{MARK} cannot be set"):
        await guarded_engine().add_request("id", "prompt", params)
    with pytest.raises(ValueError, match=f"{MARK} cannot be set"):
        await guarded_engine().add_request(request_id="id", prompt="prompt", params=params)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(extra_args={"other": 1}), PoolingParams()])
async def test_other_requests_pass(params: Any):
    assert (await guarded_engine().add_request("id", "prompt", params))[2] is params


async def test_all_workers_of_all_engines_are_asked():
    """vLLM's own `collective_rpc` returns what the first engine's workers do."""
    asked = []

    async def call_utility_all_async(*arguments: Any) -> list[list[str | None]]:
        asked.append(arguments)
        return [[None, None], [None, "no space left"]]

    client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async))
    assert await call_workers(client, "scoremode_write_failure", "one", 3) == [None, None, None, "no space left"]
    assert asked == [("collective_rpc", "scoremode_write_failure", None, ("one", 3), {})]
