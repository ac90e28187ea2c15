"""Scoring on an engine, without HTTP, and the turns that answers take."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config.lora import LoRAConfig

from scoremode_server.prefix_cache.engine import ScoredRows
from scoremode_server.scoring.scorer import ScoredSequence, Scorer, ScoreSettings, Turns, check_engine
from tests.unit.server.prefix_cache.cache_setup import Setup, setup
from tests.unit.server.prefix_cache.fake_engine import expected_rows

TOKENS = list(range(20))


async def scored(
    made: Setup, tokens: list[int], turns: Turns | None = None, first: int = 0, **options: Any
) -> ScoredRows:
    scorer = Scorer(made.scoring, turns or Turns())
    async with made.scoring.admission.request(1, len(tokens)) as queue:
        settings = ScoreSettings(request_id="id", queue=queue, **options)
        (answer,) = [answer async for answer in scorer.scores([ScoredSequence(tokens, first)], settings)]
    return answer


async def test_rows_are_those_of_the_requested_tokens():
    made = setup()
    answer = await scored(made, TOKENS, first=7, top_logprobs=2)
    assert np.array_equal(answer.rows.logprobs, expected_rows(TOKENS, 3)[1][6:])
    answer = await scored(made, [4], top_logprobs=3)
    assert (answer.rows.logprobs.shape, answer.num_cached_tokens, made.engine.num_requests) == ((0, 4), 0, 1)


@pytest.mark.parametrize(
    ("max_bytes", "options"),
    [(1 << 24, [{"use_cache": False, "cache_salt": "shared"}] * 2), (0, [{"owner": "a"}, {"owner": "b"}])],
)
async def test_keys_and_values_that_may_not_be_shared_have_different_salts(max_bytes, options):
    made = setup(max_bytes=max_bytes)
    for each in options:
        await scored(made, TOKENS, **each)
    assert len({*made.engine.salts, None, ""}) == 4


async def test_owners_and_salts_share_nothing():
    made = setup()
    await scored(made, TOKENS, owner="a", cache_salt="x")
    for options in ({"owner": "b", "cache_salt": "x"}, {"owner": "a", "cache_salt": "y"}, {"owner": "a"}, {}):
        assert (await scored(made, TOKENS, **options)).num_cached_tokens == 0
    assert (await scored(made, TOKENS, owner="a", cache_salt="x")).num_cached_tokens > 0


async def test_few_resume_in_one_turn_of_the_event_loop_first_come_first_served():
    turns, went, loop_turn = Turns(at_once=3), [], 0

    async def answer(number: int) -> None:
        await turns.wait()
        went.append((number, loop_turn))

    tasks = [asyncio.create_task(answer(number)) for number in range(20)]
    while not all(task.done() for task in tasks):
        loop_turn += 1
        await asyncio.sleep(0)
    assert [number for number, _ in went] == list(range(20))
    assert max(Counter(turn for _, turn in went).values()) == 3


@pytest.mark.parametrize(
    ("mode", "fast_prefill", "lora", "flag"),
    [
        ("processed_logprobs", False, None, "--logprobs-mode"),
        ("raw_logprobs", True, None, "--kv-sharing"),
        # This platform is a CPU.
        ("raw_logprobs", False, LoRAConfig(), "--enable-lora"),
    ],
)
def test_settings_that_change_logprobs_are_refused(mode: str, fast_prefill: bool, lora: LoRAConfig | None, flag: str):
    config = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode=mode),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        lora_config=lora,
    )
    with pytest.raises(ValueError, match=flag):
        check_engine(config)
