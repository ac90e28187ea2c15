"""Streams of requests through the cache, on a fake engine that does to it what vLLM does."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode_server.engine.sequence import EnginePass
from scoremode_server.engine.store import BLOCK_OVERHEAD_BYTES
from tests.unit.server.engine import fake_engine
from tests.unit.server.engine.cache_setup import LORAS, ROOM, Ask, Setup, outcome, setup


def random_ask(draws: random.Random, known: list[list[int]], size: int) -> Ask:
    """A request that shares a prefix, of any length, with earlier ones more often than not."""
    start = draws.choice(known) if known and draws.random() < 0.9 else []
    start = start[: draws.choice([len(start), draws.randrange(len(start) + 1), len(start) // size * size])]
    token_ids = [*start, *(draws.randrange(2) for _ in range(draws.randrange(2 if start else 3, 8)))]
    token_ids = token_ids[:30] if len(token_ids) >= 2 else [0, 1, *token_ids]
    known.append(token_ids)
    del known[:-12]
    return Ask(
        token_ids,
        top=draws.choice([0, 0, 0, 1, 3]),
        adapter=draws.choice([0, 0, 0, 1, 2]),
        salt=draws.choice([None, None, None, "mine"]),
        scores=draws.random() < 0.7,
        cached=draws.random() < 0.95,
        first=draws.choice([1, 1, 1, draws.randrange(1, len(token_ids))]),
    )


async def change_something(setup: Setup, draws: random.Random) -> None:
    engine = setup.engine
    match draws.randrange(5):
        case 0:
            await engine.reset_prefix_cache()
        case 1:
            await engine.add_lora(LORAS[draws.choice([1, 2])])
        case 2:
            await engine.update_weights()
        case 3:
            await engine.sleep()
        case _:
            setup.store.clear()


async def run_stream(seed: int, num_asks: int, *, trouble: float, changes: float, cancels: float) -> Setup:
    """In-flight requests that share prefixes, some of them cancelled at any moment."""
    draws = random.Random(seed)
    size = draws.choice([1, 2, 3, 4])
    max_bytes = draws.choice([ROOM, 20 * BLOCK_OVERHEAD_BYTES, 3 * BLOCK_OVERHEAD_BYTES, BLOCK_OVERHEAD_BYTES])
    chances = dict.fromkeys(("losses", "aborts", "evictions", "preemptions"), trouble)
    made = setup(max_bytes, size, seed=seed, latency=draws.choice([0, 3, 8]), **chances)
    known: list[list[int]] = []
    pending: set[asyncio.Task[EnginePass | None]] = set()

    async def settle(num_left: int) -> None:
        nonlocal pending
        while len(pending) > num_left:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()
            assert made.num_bytes() == made.store.num_bytes <= max_bytes

    for _ in range(num_asks):
        pending.add(asyncio.create_task(outcome(made, random_ask(draws, known, size))))
        if draws.random() < cancels:
            for _ in range(draws.randrange(8)):
                await asyncio.sleep(0)
            draws.choice(sorted(pending, key=lambda task: task.get_name())).cancel()
        if draws.random() < changes:
            await change_something(made, draws)
        await settle(draws.choice([0, 3, 8]))
    await settle(0)
    made.check_nothing_is_left()
    return made


def seeds(start: int, few: int, many: int, step: int = 1) -> list[object]:
    """The first `few` seeds for every run, and the others for `make test-slow`."""
    return [
        pytest.param(start + index * step, marks=[pytest.mark.slow] if index >= few else []) for index in range(many)
    ]


@pytest.mark.parametrize("seed", seeds(0, 20, 1000))
async def test_every_answer_is_the_uncached_one_whatever_happens(seed: int):
    await run_stream(seed, 100, trouble=0.08, changes=0.04, cancels=0.1)


@pytest.mark.parametrize("first_seed", seeds(10_000, 3, 100, step=100))
async def test_every_answer_is_the_uncached_one_in_thousands_of_short_streams(first_seed: int):
    for seed in range(first_seed, first_seed + 100):
        await run_stream(seed, 12, trouble=0.08, changes=0.1, cancels=0.1)


@pytest.mark.parametrize("seed", seeds(1000, 8, 300))
async def test_every_answer_is_the_uncached_one_in_quiet_and_rows_are_counted_once(seed: int):
    made = await run_stream(seed, 100, trouble=0, changes=0, cancels=0)
    assert made.counted("hits") + made.counted("misses") == made.num_rows


@pytest.mark.parametrize("seed", seeds(2000, 8, 300))
async def test_an_engine_that_forgets_and_loses_most_of_it_changes_no_answer(seed: int):
    await run_stream(seed, 100, trouble=0.4, changes=0, cancels=0.3)


async def test_a_row_that_is_nan_is_stored_with_no_block(monkeypatch: pytest.MonkeyPatch):
    """Also if the request that it was computed for needs later rows alone."""
    made, ask, rows_after = setup(), Ask([0, 1] * 5), fake_engine.rows_after

    def with_nan(*arguments: Any) -> tuple[np.ndarray, ...]:
        token_ids, logprobs, ranks = rows_after(*arguments)
        logprobs[1] = np.nan
        return token_ids, logprobs, ranks

    with monkeypatch.context() as patch:
        patch.setattr(fake_engine, "rows_after", with_nan)
        await made.ask(replace(ask, first=3))
    await made.ask(ask)
