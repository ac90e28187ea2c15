"""Reading vLLM's outputs, on outputs written by hand: no engine."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from scoremode_server.errors import EngineOutputError
from scoremode_server.scoring import NO_RANK, Scorer, check_engine, gather, read_score, score_params, unscored
from scoremode_server.turns import Turns

TOKENS = [4, 7, 9]


def flat(*positions: list[tuple[int, float, int]] | None) -> FlatLogprobs:
    """vLLM's logprobs of each position, as (token, logprob, rank)."""
    result = FlatLogprobs()
    for position in positions:
        if position is None:
            result.append(None)
        else:
            result.append_fast(*map(list, zip(*position, strict=True)), [None] * len(position))
    return result


def output_of(prompt: FlatLogprobs | None, sampled: FlatLogprobs | None, reason: str = "length") -> RequestOutput:
    completion = CompletionOutput(0, "", [9], None, sampled, finish_reason=reason)
    return RequestOutput("id", None, TOKENS[:-1], prompt, [completion], True, num_cached_tokens=2)


PLAIN = output_of(flat(None, [(7, -1.5, 3)]), flat([(9, -0.25, 1)]))


def test_every_token_but_the_first_has_a_logprob_and_a_rank():
    score = read_score(TOKENS, 0, PLAIN)
    assert np.array_equal(score.logprobs, [np.nan, -1.5, -0.25], equal_nan=True)
    assert score.ranks.tolist() == [NO_RANK, 3, 1]
    assert score.top_token_ids.shape == score.top_logprobs.shape == (3, 0)
    assert score.num_cached_tokens == 2


def test_alternatives_stand_behind_the_actual_token():
    prompt = flat(None, [(7, -1.5, 3), (2, -0.5, 1), (5, -1.0, 2)])
    sampled = flat([(9, -0.25, 1), (9, -0.25, 1), (1, -3.0, 2)])
    score = read_score(TOKENS, 2, output_of(prompt, sampled))
    assert score.top_token_ids[1:].tolist() == [[2, 5], [9, 1]]
    assert score.top_logprobs[1:].tolist() == [[-0.5, -1.0], [-0.25, -3.0]]


async def test_a_score_waits_for_its_turn():
    class Engine:
        vllm_config = engine_config()

        async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
            yield PLAIN

    class LateTurns(Turns):
        async def take(self) -> None:
            await come.wait()

    come = asyncio.Event()
    scoring = asyncio.create_task(Scorer(Engine(), LateTurns()).score(TOKENS, request_id="id"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not scoring.done()
    come.set()
    assert (await scoring).ranks.tolist() == [NO_RANK, 3, 1]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (output_of(None, None, "abort"), "abort"),
        (output_of(flat(None, [(8, -1.5, 3)]), flat([(9, -0.25, 1)])), "other tokens"),
        (output_of(flat(None), flat([(9, -0.25, 1)])), "other tokens"),
        (output_of(flat(None, [(7, float("nan"), 1)]), flat([(9, -0.25, 1)])), "position 1 is NaN"),
        (output_of(flat(None, [(7, -1.0, 1)]), flat([(9, float("nan"), 1)])), "position 2 is NaN"),
    ],
    ids=["aborted", "another token", "a row missing", "NaN in the prompt", "NaN at the end"],
)
def test_an_output_that_is_not_the_score_is_an_error_and_never_a_number(output: RequestOutput, message: str):
    with pytest.raises(EngineOutputError, match=message):
        read_score(TOKENS, 0, output)


def test_the_last_token_is_forced_and_never_fed():
    params = score_params(TOKENS, top_logprobs=4)
    assert (params.allowed_token_ids, params.max_tokens, params.temperature) == ([9], 1, 0)
    assert params.prompt_logprobs == params.logprobs == 4


def test_a_single_token_has_no_params_and_a_score_of_nothing():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        score_params([4])
    assert np.isnan(unscored([4], 3).logprobs).tolist() == [True]
    assert unscored([4], 3).top_token_ids.shape == (1, 3)


def engine_config(logprobs_mode: str = "raw_logprobs", fast_prefill: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode=logprobs_mode),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
    )


@pytest.mark.parametrize(
    ("config", "flag"),
    [(engine_config("processed_logprobs"), "--logprobs-mode"), (engine_config(fast_prefill=True), "--kv-sharing")],
)
def test_settings_that_make_logprobs_something_else_are_refused(config: SimpleNamespace, flag: str):
    check_engine(engine_config())
    with pytest.raises(ValueError, match=flag):
        check_engine(config)


async def test_a_failure_cancels_the_others_and_is_raised_as_it_is():
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise EngineOutputError("broken")

    with pytest.raises(EngineOutputError, match="broken"):
        await gather([wait(), fail()])
    assert cancelled.is_set()
    assert await gather([asyncio.sleep(0, "a"), asyncio.sleep(0, "b")]) == ["a", "b"]
