"""What an API server orders of several ranks and engines, when they differ, and when they are gone."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.admission import Admission, EngineSize
from scoremode_server.errors import BusyError, RequestError
from scoremode_server.references import exchange
from scoremode_server.references.exchange import UnreadableFileError, WorkerFiles
from scoremode_server.references.worker.orders import WindowMark
from tests.unit.server.engine.fake_engine import until
from tests.unit.server.references.reference_setup import HEAD


class Workers:
    """Two engines at most, each with a rank without an LM head and two with one, which do at once what is ordered.

    Attributes:
        ordered: types of orders, of which reference or file, and the engine.
        change: what a rank answers, in the place of its answer.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.engine_core = SimpleNamespace(call_utility_all_async=self._call)
        self.errored = False
        parallel = SimpleNamespace(data_parallel_size=num_engines, local_engines_only=False, data_parallel_index=3)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.ordered: list[tuple[int, str, str]] = []
        self.change: Callable[[int, Any], Any] = lambda rank, answer: answer
        self.num_calls = 0
        self._num_engines = num_engines

    async def _call(self, call: str, method: str, *rest: Any) -> list[list[Any]]:
        assert (call, method) == ("collective_rpc", "scoremode_exchange")
        _, arguments, _ = rest
        self.num_calls += 1
        (orders,) = arguments
        assert orders.keys() == set(range(3, 3 + self._num_engines))
        await asyncio.sleep(0)
        return [[None, *self._answers(engine, *of_engine)] for engine, of_engine in enumerate(orders.values())]

    def _answers(self, engine: int, orders: list[dict[str, Any]], tickets: list[str]) -> list[Any]:
        for order in orders:
            what = order["mark"]["reference"] if "mark" in order else order.get("ticket", order.get("key"))
            self.ordered.append((engine, order["type"], what))
        return [self.change(rank, {"outcomes": dict.fromkeys(tickets, ""), "num_refused": 0}) for rank in range(2)]


def instead(answer: Any, what: str, outcome: str | None) -> Any:
    """A rank's answer with another outcome of one file or head."""
    return {**answer, "outcomes": {**answer["outcomes"], what: outcome}}


async def abort(request_ids: list[str]) -> None:
    """Nothing is in an engine."""


@pytest.fixture
def admission() -> Admission:
    return Admission(EngineSize(tokens=100, sequences=8, max_scoring_tokens=1000), abort, lambda *counts: None)


def mark(reference: str, index: int = 0) -> WindowMark:
    ticket, key = f"{reference} {index}", f"head of {reference}"
    return WindowMark("compare", reference, "identity", index, 7, ticket=ticket, head=key)


async def loaded(files: WorkerFiles, stack: AsyncExitStack, window: WindowMark, rank: int | None = None) -> int | None:
    return await stack.enter_async_context(files.loaded(window, HEAD, 8, rank))


async def load(files: WorkerFiles, window: WindowMark, num_bytes: int = 8) -> None:
    async with files.loaded(window, HEAD, num_bytes):
        pass


@pytest.mark.parametrize("what", ["base 0", "head of base"])
async def test_a_window_waits_for_its_file_and_its_head_on_every_rank(admission: Admission, what: str):
    workers, late = Workers(), True

    workers.change = lambda rank, answer: instead(answer, what, None) if late and rank == 1 else answer
    waiting = asyncio.create_task(load(WorkerFiles(workers, admission), mark("base")))
    await until(lambda: workers.num_calls > 5)
    assert not waiting.done()
    late = False
    await waiting


@pytest.mark.parametrize("what", ["base 0", "head of base"])
async def test_what_one_rank_cannot_read_is_scheduled_on_none(admission: Admission, what: str):
    workers = Workers()
    workers.change = lambda rank, answer: instead(answer, what, "it is missing") if rank == 1 else answer
    files = WorkerFiles(workers, admission)
    with pytest.raises(UnreadableFileError, match=r"^it is missing$"):
        await load(files, mark("base"))
    await until(lambda: files._task and files._task.done())
    assert (0, "ForgetWindow", "base 0") in workers.ordered


async def test_windows_are_read_for_the_engine_that_computes_them(admission: Admission):
    workers = Workers(num_engines=2)
    files = WorkerFiles(workers, admission)
    async with AsyncExitStack() as stack:
        windows = [await loaded(files, stack, mark("base", index)) for index in range(3)]
        windows.append(await loaded(files, stack, mark("base", 3), rank=0))
        assert windows == [0, 1, 0, 0]
        assert [engine for engine, kind, _ in workers.ordered if kind == "ReadWindow"] == [0, 1, 0, 0]
        with pytest.raises(RequestError, match="2 is not from 0 to 1"):
            await loaded(files, stack, mark("base", 4), rank=2)


async def test_workers_keep_a_bounded_part_of_a_reference(admission: Admission):
    """However many windows are asked for at once."""
    workers = Workers()
    workers.change = lambda rank, answer: {**answer, "outcomes": dict.fromkeys(answer["outcomes"])}
    files = WorkerFiles(workers, admission)

    def num_read() -> int:
        return [kind for _, kind, _ in workers.ordered].count("ReadWindow")

    waiting = [asyncio.create_task(load(files, mark("base", index), 100)) for index in range(5)]
    await until(lambda: workers.num_calls > 5)
    assert num_read() == 3
    # One that is read and one that waits for that are given up.
    waiting[0].cancel()
    waiting[4].cancel()
    await until(lambda: num_read() == 4)
    workers.change = lambda rank, answer: answer
    await asyncio.gather(*waiting, return_exceptions=True)
    assert num_read() == 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that the test says have passed."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(exchange, "time", clock)
    return clock


async def test_a_reference_is_held_for_ten_seconds_after_another_was_refused(
    admission: Admission, clock: SimpleNamespace
):
    files = WorkerFiles(Workers(), admission)
    async with AsyncExitStack() as last:
        async with AsyncExitStack() as stack:
            await loaded(files, stack, mark("base"))
            for _ in range(3):
                # Nobody else has asked for longer than a refused client would stay away.
                clock.now += 20
                await load(files, mark("base", 1))
                with pytest.raises(BusyError, match="another reference; try again later"):
                    await load(files, mark("other"))
            for _ in range(5):
                clock.now += 1.9
                await load(files, mark("base", 1))
                with pytest.raises(BusyError):
                    await load(files, mark("other"))
            clock.now += 0.6
            # Ten seconds and a bit after the refusal: nothing more of the one that is held.
            with pytest.raises(BusyError):
                await load(files, mark("base", 1))
        # It does not come back before the one that waits.
        with pytest.raises(BusyError):
            await load(files, mark("base", 1))
        await loaded(files, last, mark("other"))
        await load(files, mark("other", 1))
        with pytest.raises(BusyError):
            await load(files, mark("base"))
        clock.now += 3
        await load(files, mark("other", 1))
    # Who does not come back is forgotten.
    clock.now += 2.1
    await load(files, mark("other"))


async def test_another_api_server_may_hold_another_reference(admission: Admission, clock: SimpleNamespace):
    """Workers refuse it then, and the server that holds one learns of that."""
    workers, num_refused = Workers(), 0
    workers.change = lambda rank, answer: instead(answer, "head of other", exchange.IN_USE)
    files = WorkerFiles(workers, admission)
    with pytest.raises(BusyError, match="another reference"):
        await load(files, mark("other"))
    workers.change = lambda rank, answer: {**answer, "num_refused": num_refused}
    async with AsyncExitStack() as stack:
        await loaded(files, stack, mark("base"))
        for _ in range(6):
            num_refused += 1
            await load(files, mark("base", 1))
            clock.now += 1.9
        with pytest.raises(BusyError):
            await load(files, mark("base", 1))


@pytest.mark.parametrize("how", ["dies", "dies unheard", "stops"])
async def test_those_who_wait_get_an_answer_when_the_engine_is_gone(
    admission: Admission, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(exchange, "ALIVE_SECONDS", 0.01)
    workers, is_gone = Workers(), False
    call = workers.engine_core.call_utility_all_async

    async def call_engine(*arguments: Any) -> Any:
        if is_gone and how == "dies":
            raise EngineDeadError
        if is_gone and how == "dies unheard":
            workers.errored = True
            await asyncio.Event().wait()
        return await call(*arguments)

    workers.engine_core.call_utility_all_async = call_engine
    # Neither the second window nor the head of the first is ever read.
    workers.change = lambda rank, answer: {
        "outcomes": {ticket: "" if ticket == "base 0" else None for ticket in answer["outcomes"]},
        "num_refused": 0,
    }
    files = WorkerFiles(workers, admission)
    headless = asyncio.create_task(load(files, mark("base")))
    unread = asyncio.create_task(load(files, mark("base", 1)))
    unwritten = asyncio.create_task(files.wait_until_done("ticket"))
    await until(lambda: workers.num_calls > 2)
    is_gone, admission.is_stopped = True, how == "stops"
    for waiting in (headless, unread, unwritten):
        with pytest.raises(RequestError, match="shutting down" if how == "stops" else "has died"):
            await waiting
