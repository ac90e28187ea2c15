"""A request's row specification reaches workers unchanged, and no client can send one."""

from collections.abc import AsyncGenerator
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from scoremode_server.rows import Column
from scoremode_server.worker.row_spec import ROWS, RowSpec, ScoringParams, guard_rows


def with_candidates(first: int, candidates: np.ndarray) -> RowSpec:
    return RowSpec(
        first, num_candidates=candidates.shape[-1], candidates=np.ascontiguousarray(candidates, np.int32).tobytes()
    )


def guarded_engine() -> Any:
    async def add_request(request_id: str, prompt: Any, params: Any, priority: int = 0) -> tuple[Any, ...]:
        return request_id, prompt, params, priority

    async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        yield sampling_params

    engine = SimpleNamespace(add_request=add_request, generate=generate)
    guard_rows(engine)
    return engine


@pytest.mark.parametrize(
    "spec",
    [
        RowSpec(),
        RowSpec(4, num_top=2, sinks={"references": {"index": 3}}, sink_columns=(Column("kld"),)),
        RowSpec(2, num_top=3, temperature=0.5, num_candidates=2, candidates=b"12345678"),
    ],
)
async def test_a_spec_reaches_the_worker_as_it_is(spec: RowSpec):
    """The engine's processes get the fields, and none of our types."""
    params = ScoringParams.of(SamplingParams(prompt_logprobs=0), spec)
    for passed in (params, copy(params), params.clone()):
        assert isinstance(passed, ScoringParams)
        assert (await guarded_engine().add_request("id", "prompt", passed, priority=2))[2:] == (passed, 2)
        sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(passed))
        assert type(sent) is SamplingParams
        got = RowSpec.read(sent)
        assert got == spec


def test_the_identity_has_all_that_decides_rows_but_not_num_top():
    shared, own = np.array([1, 2]), np.array([[1, 2]] * 7)
    assert RowSpec(5, last_token=3, num_top=9).identity is None
    assert with_candidates(1, shared).identity == with_candidates(3, shared).identity
    assert with_candidates(1, own).identity != with_candidates(2, own[1:]).identity
    with_some = (with_candidates(1, each) for each in (shared, shared[::-1], own))
    sinks = (RowSpec(sinks={"one": data}) for data in (1, 2))
    several = [RowSpec(), RowSpec(temperature=0.5), *sinks, *with_some]
    assert len({each.identity for each in several}) == len(several)


@pytest.mark.parametrize("forged", [{ROWS: {}, "other": 1}, {ROWS: None}])
async def test_forged_specs_are_refused(forged: dict[str, Any]):
    engine, params = guarded_engine(), SamplingParams(extra_args=forged)
    for method, positional, named in (
        (engine.add_request, ("id", "prompt", params), {}),
        (engine.add_request, (), {"request_id": "id", "prompt": "", "params": params}),
        (engine.generate, ("prompt", params, "id"), {}),
        (engine.generate, ("prompt",), {"request_id": "id", "sampling_params": params}),
    ):
        # When they are called, not when the result is awaited: no part of a stream was sent then.
        with pytest.raises(VLLMValidationError, match=f"{ROWS} cannot be set"):
            method(*positional, **named)
    with pytest.raises(VLLMValidationError, match=f"{ROWS} cannot be set"):
        ScoringParams.of(params, RowSpec())
    with pytest.raises(VLLMValidationError, match=f"{ROWS} cannot be set"):
        SamplingParams.from_optional(extra_args=forged)
    assert SamplingParams.from_optional(top_k=3, extra_args={"other": 1}).top_k == 3
    for others in (SamplingParams(), SamplingParams(extra_args={"other": 1}), PoolingParams()):
        assert (await engine.add_request("id", "prompt", others))[2] is others
        assert [each async for each in engine.generate("prompt", others, "id")] == [others]
