"""Sequences go to the engine in the right order and at the right time."""

import asyncio
from itertools import groupby
from typing import Any

import pytest

from scoremode_server.engine import admission
from scoremode_server.engine.admission import Admission, EngineSize, RequestQueue
from scoremode_server.errors import BusyError, OverdueError, TooLargeError


class Engine:
    """Sequences that are in an engine, until each is finished by hand."""

    def __init__(self, tokens: int = 300, sequences: int = 12, **bounds: Any) -> None:
        size = EngineSize(tokens, sequences, **{"max_scoring_tokens": 100_000} | bounds)
        self.loads: list[tuple[int, int]] = []
        self.aborted: list[list[str]] = []
        self.inside: dict[str, asyncio.Event] = {}
        self.admission = Admission(size, self.abort, lambda *load: self.loads.append(load))

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.append(request_ids)

    async def score(self, queue: RequestQueue, name: str, num_tokens: int = 10, decodes: bool = False) -> str:
        async with self.admission.slot(queue, name, num_tokens, decodes=decodes):
            self.inside[name] = asyncio.Event()
            try:
                await self.inside[name].wait()
            finally:
                del self.inside[name]
        queue.done(num_tokens, 0)
        return name

    async def request(self, names: list[str], num_tokens: int = 10) -> list[str]:
        async with self.admission.request(len(names), len(names) * num_tokens) as queue:
            return [name async for name in queue.in_order(self.score(queue, each, num_tokens) for each in names)]

    async def begin(self, names: list[str], num_tokens: int = 10) -> "asyncio.Task[list[str]]":
        task = asyncio.create_task(self.request(names, num_tokens))
        await settle()
        return task

    async def step(self) -> list[str]:
        """Finish all that is inside; their names, in the order in which they came."""
        await settle()
        names = list(self.inside)
        for name in names:
            self.inside[name].set()
        await settle()
        return names

    def check_nothing_is_left(self) -> None:
        held = self.admission
        assert (held.num_sequences, held.num_tokens, held.num_running) == (0, 0, 0)
        assert self.loads[-1] == (0, 0)
        assert not held._waiting
        assert not held._queues


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{index}" for index in range(count)]


async def test_the_engine_gets_all_but_one_of_the_sequences_that_it_holds():
    engine = Engine(sequences=12)
    answer = asyncio.create_task(engine.request(names("a", 30)))
    steps = []
    while not answer.done():
        steps.append(len(await engine.step()))
    assert steps == [11, 11, 8]
    assert await answer == names("a", 30)
    engine.check_nothing_is_left()


async def test_the_mean_batch_is_of_all_sequences_that_decode_while_a_request_runs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    engine = Engine(sequences=12)

    async def decode(names: list[str], decodes: bool = True) -> float | None:
        async with engine.admission.request(len(names), 10 * len(names)) as queue:
            sequences = (engine.score(queue, name, decodes=decodes) for name in names)
            assert [name async for name in queue.in_order(sequences)] == names
            return queue.mean_batch

    async def begin(*arguments: Any) -> "asyncio.Task[float | None]":
        task = asyncio.create_task(decode(*arguments))
        await settle()
        return task

    three = await begin(names("a", 3))
    now[0] += 6
    two, others = await begin(names("b", 2)), await begin(names("c", 5), False)
    now[0] += 2
    await engine.step()
    # 3 for six seconds, and 5 for two.
    assert (await three, await two, await others) == (pytest.approx(28 / 8), 5, None)
    engine.check_nothing_is_left()


async def test_tokens_are_reserved_for_a_request_without_any_in_the_engine():
    engine = Engine(tokens=300, reserved_tokens=50)
    large = await engine.begin(names("a", 9), num_tokens=50)
    assert list(engine.inside) == names("a", 5)
    small = [asyncio.create_task(engine.request([name], num_tokens=50)) for name in ("b", "c")]
    assert await engine.step() == [*names("a", 5), "b"]
    assert await engine.step() == ["c", "a5", "a6", "a7", "a8"]
    await asyncio.gather(large, *small)
    engine.check_nothing_is_left()


@pytest.mark.parametrize(
    ("size", "num_tokens", "per_burst"),
    [
        pytest.param({"tokens": 300, "sequences": 100}, 10, 5, id="a sixth of the tokens"),
        pytest.param({"tokens": 300, "sequences": 18}, 1, 3, id="a sixth of the sequences"),
        pytest.param({"tokens": 300, "sequences": 100}, 60, 1, id="sequences that are longer"),
    ],
)
async def test_large_requests_alternate(size, num_tokens, per_burst):
    engine = Engine(**size)
    requests = [await engine.begin(names(letter, 60), num_tokens) for letter in "abc"]
    entered = ""
    while len(entered) < 60:
        before = set(engine.inside)
        engine.inside[next(iter(engine.inside))].set()
        await settle()
        entered += "".join(name[0] for name in engine.inside if name not in before)
    bursts = [(letter, len([*group])) for letter, group in groupby(entered)]
    # The first request had filled the engine before the others came, and the last burst is cut off.
    assert bursts[-7:-1] == 2 * bursts[-4:-1]
    assert sorted(bursts[-4:-1]) == [(letter, per_burst) for letter in "abc"]
    while engine.inside:
        await engine.step()
    await asyncio.gather(*requests)


async def test_a_single_sequence_overtakes_requests_that_wait_with_more():
    engine = Engine(tokens=300, reserved_tokens=50)
    first = await engine.begin(["first"], num_tokens=40)
    larger = [await engine.begin(names(letter, 4), num_tokens=90) for letter in "abc"]
    single = await engine.begin(["single"])
    assert list(engine.inside) == ["first", "a0", "a1", "a2"]
    # 30 of the 300 tokens become free.
    engine.inside["first"].set()
    await settle()
    assert list(engine.inside) == ["a0", "a1", "a2", "single", "b0"]
    while engine.inside:
        await engine.step()
    await asyncio.gather(first, single, *larger)
    engine.check_nothing_is_left()


async def test_a_client_that_leaves_is_aborted_in_one_call_and_others_resume():
    engine = Engine(sequences=12)
    leaves = await engine.begin(names("a", 1000))
    stays = await engine.begin(["b"])
    assert list(engine.inside) == [*names("a", 11), "b"]
    leaves.cancel()
    await settle()
    assert [sorted(call) for call in engine.aborted] == [sorted(names("a", 11))]
    assert list(engine.inside) == ["b"]
    await engine.step()
    assert await stays == ["b"]
    engine.check_nothing_is_left()


async def test_a_sequence_that_is_cancelled_at_its_turn_gives_it_back():
    engine = Engine(sequences=3)
    inside = [await engine.begin([name]) for name in names("a", 3)]
    waiting = await engine.begin(["b"])
    (line,) = engine.admission._waiting.values()
    line[0].admitted.add_done_callback(lambda _: waiting.cancel())
    while engine.inside:
        await engine.step()
    await asyncio.gather(*inside, waiting, return_exceptions=True)
    assert waiting.cancelled()
    engine.check_nothing_is_left()


async def test_a_failure_cancels_the_rest_and_is_raised_as_it_is():
    engine = Engine()

    async def fail() -> str:
        await asyncio.sleep(0)
        raise ValueError("broken")

    async with engine.admission.request(2, 20) as queue:
        with pytest.raises(ValueError, match="broken"):
            _ = [answer async for answer in queue.in_order([fail(), engine.score(queue, "a")])]
    assert engine.aborted == [["a"]]
    engine.check_nothing_is_left()


async def test_more_tokens_than_may_wait_now_or_ever_are_refused():
    engine = Engine(max_scoring_tokens=100)
    with pytest.raises(TooLargeError, match="--max-scoring-tokens"):
        await engine.request(["a"], num_tokens=101)
    first = await engine.begin(["b"], num_tokens=80)
    with pytest.raises(BusyError, match=r"100 tokens \(--max-scoring-tokens\) are taken"):
        await engine.request(["c"], num_tokens=21)
    second = asyncio.create_task(engine.request(["d"], num_tokens=20))
    await engine.step()
    await asyncio.gather(first, second)
    engine.check_nothing_is_left()


async def test_a_request_that_takes_too_long_is_aborted():
    engine = Engine(request_timeout=0.01)
    engine.admission.start_clock()
    with pytest.raises(OverdueError, match="--request-timeout"):
        await engine.request(names("a", 3))
    assert [sorted(call) for call in engine.aborted] == [names("a", 3)]
    engine.check_nothing_is_left()


async def test_after_the_grace_period_the_remaining_requests_end():
    engine = Engine(sequences=3)
    requests = [await engine.begin(names(letter, 5)) for letter in "abc"]
    await engine.admission.drain(0)
    assert sorted(engine.aborted[0]) == ["a0", "a1", "b0"]
    await engine.step()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(result) for result in results] == 3 * ["the server is shutting down"]
    engine.check_nothing_is_left()
