"""Scoring on an engine, without HTTP."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scoremode_server.prefix_cache.engine import Answer
from scoremode_server.scoring.scorer import ScoredSequence, Scorer, ScoreSettings, check_engine
from scoremode_server.scoring.turns import Turns
from tests.unit.server.prefix_cache.cache_setup import Setup, setup
from tests.unit.server.prefix_cache.fake_engine import expected_rows

TOKENS = list(range(20))


async def scored(made: Setup, tokens: list[int], turns: Turns | None = None, first: int = 0, **options: Any) -> Answer:
    scorer = Scorer(made.scoring, turns or Turns())
    async with made.scoring.admission.request("/v1/score", "id", 1, len(tokens)) as queue:
        settings = ScoreSettings(request_id="id", queue=queue, **options)
        (answer,) = [answer async for answer in scorer.scores([ScoredSequence(tokens, first)], settings)]
    return answer


@pytest.mark.parametrize("first", [1, 7, 19])
async def test_rows_are_of_the_tokens_that_were_asked_for(first: int):
    answer = await scored(setup(), TOKENS, first=first, top_logprobs=2)
    ids, logprobs, ranks = (array[first - 1 :] for array in expected_rows(TOKENS, 3))
    assert np.array_equal(answer.rows.token_ids, ids)
    assert np.array_equal(answer.rows.logprobs, logprobs)
    assert np.array_equal(answer.rows.ranks, ranks)


async def test_a_single_token_has_no_rows_and_no_request():
    made = setup()
    answer = await scored(made, [4], top_logprobs=3)
    assert answer.rows.logprobs.shape == (0, 4)
    assert answer.num_cached_tokens == 0
    assert made.engine.num_requests == 0


async def test_what_may_not_be_cached_has_a_salt_of_its_own():
    made = setup()
    for _ in range(2):
        await scored(made, TOKENS, use_cache=False, cache_salt="shared")
    first, second = made.engine.salts
    assert first != second
    assert not made.engine.prefix_cache.keys() & {"shared"}


async def test_owners_and_salts_share_nothing():
    made = setup()
    await scored(made, TOKENS, owner="a", cache_salt="x")
    for options in ({"owner": "b", "cache_salt": "x"}, {"owner": "a", "cache_salt": "y"}, {"owner": "a"}, {}):
        assert (await scored(made, TOKENS, **options)).num_cached_tokens == 0
    assert (await scored(made, TOKENS, owner="a", cache_salt="x")).num_cached_tokens > 0


async def test_keys_and_values_of_an_owner_have_a_salt_even_where_no_rows_are_kept():
    made = setup(max_bytes=0)
    for owner in ("a", "b"):
        await scored(made, TOKENS, owner=owner)
    first, second = made.engine.salts
    assert first
    assert second
    assert first != second


async def test_a_score_waits_for_its_turn():
    class LateTurns(Turns):
        async def take(self) -> None:
            await come.wait()

    made = setup(latency=0)
    come = asyncio.Event()
    scoring = asyncio.create_task(scored(made, TOKENS, LateTurns()))
    for _ in range(60):
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
