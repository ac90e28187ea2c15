"""Sequences that may enter the engine at some times only."""

import asyncio

import pytest

from scoremode_server.prefix_cache.admission import Admission, EngineSize, Gate, RequestQueue


async def abort(request_ids: list[str]) -> None:
    """Nothing is in an engine."""


@pytest.fixture
def admission() -> Admission:
    return Admission(EngineSize(tokens=100, sequences=3, max_scoring_tokens=1000), abort, lambda *counts: None)


async def entering(queue: RequestQueue, name: str, gate: Gate | None) -> asyncio.Task[None]:
    task = asyncio.create_task(queue.enter(name, 10, 0, gate))
    await asyncio.sleep(0)
    return task


async def test_those_at_a_closed_gate_let_others_pass(admission: Admission):
    idle: list[int] = []
    gate, other = Gate(admission, lambda: idle.append(1)), Gate(admission, lambda: None)
    one, two = RequestQueue(admission), RequestQueue(admission)
    first = await entering(one, "first", gate)
    second = await entering(one, "second", gate)
    passing = await entering(two, "passing", None)
    # Also of the same request, whose windows may be on several engines.
    other.open()
    elsewhere = await entering(one, "elsewhere", other)
    await asyncio.gather(passing, elsewhere)
    assert (first.done(), admission.num_running, gate.num_running, other.num_running) == (False, 2, 0, 1)
    gate.open()
    await first
    # The engine is full.
    assert not second.done()
    gate.close()
    two.leave("passing", 10)
    assert (gate.num_running, second.done()) == (1, False)
    assert not idle
    one.leave("first", 10, 0, gate)
    assert idle
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    one.leave("elsewhere", 10, 0, other)
    assert admission.num_running == gate.num_running == other.num_running == 0
    assert not admission._waiting


async def test_a_gate_that_never_opens_ends_those_who_wait(admission: Admission):
    gate, queue = Gate(admission, lambda: None), RequestQueue(admission)
    waiting = [await entering(queue, str(number), gate) for number in range(2)]
    gate.refuse(lambda: ValueError("gone"))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(result) for result in results] == ["gone", "gone"]
    assert results[0] is not results[1]
    assert not admission._waiting
    assert admission.num_running == 0
