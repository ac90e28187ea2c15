"""Answers that are ready take turns with what has just arrived."""

import asyncio
from collections import Counter

from scoremode_server.scoring.turns import Turns


async def turned(turns: Turns, count: int) -> list[tuple[int, int]]:
    """(task, turn of the event loop in which it went on) of tasks that ask at the same time, in the order they went."""
    went: list[tuple[int, int]] = []
    loop_turn = 0

    async def answer(number: int) -> None:
        await turns.take()
        went.append((number, loop_turn))

    tasks = [asyncio.create_task(answer(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        loop_turn += 1
        await asyncio.sleep(0)
    return went


async def test_few_go_on_in_one_turn_of_the_event_loop():
    went = await turned(Turns(at_once=3), 20)
    assert max(Counter(turn for _, turn in went).values()) == 3


async def test_first_come_first_served():
    assert [number for number, _ in await turned(Turns(at_once=3), 20)] == list(range(20))


async def test_new_arrivals_go_between_the_answers():
    """What becomes ready while 60 answers wait is not answered after all of them, as it would be without turns."""
    turns = Turns(at_once=4)
    order: list[str] = []

    async def answer() -> None:
        await turns.take()
        order.append("answer")

    async def arrive() -> None:
        await asyncio.sleep(0)
        order.append("arrival")

    await asyncio.gather(*(answer() for _ in range(60)), arrive())
    assert order.index("arrival") <= 8
    assert order.count("answer") == 60


async def test_who_leaves_holds_nobody_up():
    turns = Turns(at_once=2)
    tasks = [asyncio.create_task(turns.take()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[:6]:
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=10)
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 6
    await asyncio.wait_for(turns.take(), timeout=10)
