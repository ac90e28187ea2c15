"""Scoring on an engine, without HTTP."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from scoremode_server.errors import EngineOutputError
from scoremode_server.scoring.scorer import Scorer, check_engine, gather
from scoremode_server.scoring.turns import Turns
from tests.unit.server.prefix_cache.cache_setup import setup
from tests.unit.server.prefix_cache.fake_engine import expected_rows

TOKENS = list(range(20))


@pytest.mark.parametrize("first", [1, 7, 19])
async def test_rows_are_of_the_tokens_that_were_asked_for(first: int):
    scorer = Scorer(setup().scoring, Turns())
    score = await scorer.score(TOKENS, request_id="id", first=first, top_logprobs=2)
    ids, logprobs, ranks = (array[first - 1 :] for array in expected_rows(TOKENS, 3))
    assert np.array_equal(score.rows.token_ids, ids)
    assert np.array_equal(score.rows.logprobs, logprobs)
    assert np.array_equal(score.rows.ranks, ranks)


async def test_a_single_token_has_no_rows_and_no_request():
    made = setup()
    score = await Scorer(made.scoring, Turns()).score([4], request_id="id", top_logprobs=3)
    assert score.rows.logprobs.shape == (0, 4)
    assert made.engine.num_requests == 0


async def test_a_score_waits_for_its_turn():
    class LateTurns(Turns):
        async def take(self) -> None:
            await come.wait()

    made = setup(latency=0)
    come = asyncio.Event()
    scoring = asyncio.create_task(Scorer(made.scoring, LateTurns()).score(TOKENS, request_id="id"))
    for _ in range(40):
        await asyncio.sleep(0)
    assert (made.engine.num_requests, made.engine.num_running) == (1, 0)
    assert not scoring.done()
    come.set()
    assert len((await scoring).rows) == 19


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
