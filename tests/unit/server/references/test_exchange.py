"""An API server orders files from several ranks and engines, which may differ and may be gone."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.admission import Admission, EngineSize
from scoremode_server.errors import BusyError, EngineOutputError, RequestError
from scoremode_server.references import exchange
from scoremode_server.references.exchange import LeaseEndedError, UnreadableFileError, WorkerFiles
from scoremode_server.references.worker import lease
from scoremode_server.references.worker.lease import Lease
from scoremode_server.references.worker.orders import LeaseCall, LeaseState, WindowMark
from tests.unit.server.engine.fake_engine import until
from tests.unit.server.references.reference_setup import HEAD


class Workers:
    """Two engines at most, each with a rank without an LM head and two with one, which do at once what is ordered.

    Attributes:
        ordered: types of orders, of which reference or ticket, and the engine.
        change: what a rank answers instead of its answer.
        fails: whether calls fail.
        loses_answers: whether calls fail after the workers have done what they say.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.engine_core = SimpleNamespace(call_utility_all_async=self._call)
        self.errored = False
        parallel = SimpleNamespace(data_parallel_size=num_engines, local_engines_only=False, data_parallel_index=3)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.ordered: list[tuple[int, str, str]] = []
        self.change: Callable[[int, Any], Any] = lambda rank, answer: answer
        self.fails = self.loses_answers = False
        self.num_calls = 0
        self.leases = [Lease() for _ in range(num_engines)]

    async def _call(self, call: str, method: str, *rest: Any) -> list[list[Any]]:
        assert (call, method) == ("collective_rpc", "scoremode_exchange")
        _, arguments, _ = rest
        self.num_calls += 1
        (messages,) = arguments
        assert messages.keys() == set(range(3, 3 + len(self.leases)))
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("lost")
        answers = [[None, *self._answers(engine, *message)] for engine, message in enumerate(messages.values())]
        if self.loses_answers:
            raise RuntimeError("lost")
        return answers

    def _answers(self, engine: int, orders: list[dict[str, Any]], tickets: list[str], call: Any) -> list[Any]:
        for order in orders:
            what = order["mark"]["reference"] if "mark" in order else order["ticket"]
            self.ordered.append((engine, order["type"], what))
        lease = self.leases[engine]
        is_granted = lease.update(msgspec.convert(call, LeaseCall))
        state = LeaseState(key=lease.key, is_granted=is_granted, is_used=lease.is_used, waiting=lease.waiting)
        outcomes = dict.fromkeys(tickets, "") | dict.fromkeys(
            ticket for ticket in tickets if ticket.startswith("head of") and ticket != lease.key
        )
        return [self.change(rank, {"outcomes": outcomes, "lease": state}) for rank in range(2)]


WHAT = {
    "file": lambda ticket: ticket == "base 0",
    "head's file": lambda ticket: not ticket.endswith((" 0", " of base")),
    "head": lambda ticket: ticket == "head of base",
}
"""Tests whether a ticket is for one of the things that a window needs."""


def instead(answer: Any, what: str, outcome: str | None) -> Any:
    """A rank's answer with another outcome of a file or a head."""
    outcomes = {ticket: outcome if WHAT[what](ticket) else told for ticket, told in answer["outcomes"].items()}
    return {**answer, "outcomes": outcomes}


async def abort(request_ids: list[str]) -> None:
    """Do nothing: no request is in an engine."""


@pytest.fixture
def admission() -> Admission:
    return Admission(EngineSize(tokens=100, sequences=8, max_scoring_tokens=1000), abort, lambda *counts: None)


def mark(reference: str, index: int = 0) -> WindowMark:
    ticket, key = f"{reference} {index}", f"head of {reference}"
    return WindowMark("compare", reference, "identity", index, 7, ticket=ticket, head=key)


async def loaded(
    files: WorkerFiles, stack: AsyncExitStack, window: WindowMark, rank: int | None = None
) -> tuple[int | None, Callable[[], AbstractContextManager[None]]]:
    return await stack.enter_async_context(files.loaded(window, HEAD, 8, rank))


async def load(files: WorkerFiles, window: WindowMark, num_tokens: int = 8, wait: float | None = None) -> None:
    async with files.loaded(window, HEAD, num_tokens, wait=wait) as (_, inside):
        with inside():
            await asyncio.sleep(0)


@pytest.mark.parametrize("what", WHAT)
async def test_a_window_waits_for_its_file_and_its_head_on_every_rank(admission: Admission, what: str):
    workers, late = Workers(), True

    workers.change = lambda rank, answer: instead(answer, what, None) if late and rank == 1 else answer
    waiting = asyncio.create_task(load(WorkerFiles(workers, admission), mark("base")))
    await until(lambda: workers.num_calls > 5)
    assert not waiting.done()
    late = False
    await waiting


@pytest.mark.parametrize("what", WHAT)
async def test_what_one_rank_cannot_read_is_scheduled_on_none(admission: Admission, what: str):
    workers = Workers()
    workers.change = lambda rank, answer: instead(answer, what, "it is missing") if rank == 1 else answer
    files = WorkerFiles(workers, admission)
    with pytest.raises(UnreadableFileError, match=r"^it is missing$"):
        await load(files, mark("base"))
    await until(lambda: files._task and files._task.done())
    of_reads = [kind for _, kind, _ in workers.ordered]
    assert of_reads.count("Forget") == len(of_reads) / 2 > 0


async def test_windows_are_read_for_the_engine_that_computes_them(admission: Admission):
    workers = Workers(num_engines=2)
    files = WorkerFiles(workers, admission)
    async with AsyncExitStack() as stack:
        windows = [(await loaded(files, stack, mark("base", index)))[0] for index in range(3)]
        windows.append((await loaded(files, stack, mark("base", 3), rank=0))[0])
        assert windows == [0, 1, 0, 0]
        assert [engine for engine, kind, _ in workers.ordered if kind == "ReadWindow"] == [0, 1, 0, 0]
        with pytest.raises(RequestError, match="2 is not from 0 to 1"):
            await loaded(files, stack, mark("base", 4), rank=2)


async def test_workers_keep_a_bounded_part_of_a_reference(admission: Admission):
    """However many windows are asked for at once."""
    workers = Workers()
    no_window = dict.fromkeys(f"base {index}" for index in range(5))
    workers.change = lambda rank, answer: {**answer, "outcomes": answer["outcomes"] | no_window}
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


async def test_windows_that_are_not_in_the_engine_when_a_lease_ends_wait_for_the_next(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.0)
    workers = Workers()
    files = WorkerFiles(workers, admission)
    async with AsyncExitStack() as stack:
        _, inside = await loaded(files, stack, mark("base"))
        _, late = await loaded(files, stack, mark("base", 1))
        with inside():
            other = asyncio.create_task(load(files, mark("other")))
            await until(lambda: "head of other" in workers.leases[0].waiting)
            await until(lambda: not files._engines[0].lease["is_granted"])
            # The window in the engine uses the reference still.
            assert not other.done()
            with pytest.raises(LeaseEndedError), late():
                pass
        await other
        await load(files, mark("base", 2))
    await until(lambda: files._task and files._task.done())


async def test_a_window_that_waits_too_long_is_refused_and_keeps_its_place(admission: Admission):
    workers = Workers()
    files = WorkerFiles(workers, admission)
    async with AsyncExitStack() as stack:
        _, inside = await loaded(files, stack, mark("base"))
        with inside():
            with pytest.raises(BusyError, match=r"with other references for 0.1 s: try again later"):
                await load(files, mark("other"), wait=0.1)
            assert "head of other" in workers.leases[0]._places


async def test_a_lost_call_leaves_no_reference_in_use(admission: Admission, monkeypatch: pytest.MonkeyPatch):
    """The API server that compared with it has nothing else to do, and calls until the workers know."""
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    workers = Workers()
    first, second = WorkerFiles(workers, admission), WorkerFiles(workers, admission)
    async with first.loaded(mark("base"), HEAD, 8):
        workers.fails = True
    num_calls = workers.num_calls
    await until(lambda: workers.num_calls > num_calls + 1)
    workers.fails = False
    await load(second, mark("other"))
    await until(lambda: first._task and first._task.done())
    kinds = [(kind, what) for _, kind, what in workers.ordered]
    assert kinds.count(("Forget", "base 0")) == 1


async def test_a_lost_answer_leaves_no_reference_in_use(admission: Admission, monkeypatch: pytest.MonkeyPatch):
    """The API server does not know that it may use the reference, and calls until the workers know that it does not."""
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    workers = Workers()
    files = WorkerFiles(workers, admission)
    await load(files, mark("base"))
    await until(lambda: files._task and files._task.done())
    waiting = asyncio.create_task(load(files, mark("base")))
    workers.loses_answers = True
    with pytest.raises(EngineOutputError, match="lost"):
        await waiting
    workers.loses_answers = False
    await until(lambda: files._task and files._task.done())
    assert not workers.leases[0].is_used
    assert not workers.leases[0].waiting


async def test_a_head_that_cannot_be_placed_holds_up_no_other_reference(admission: Admission):
    """Although a window of it waits for a file that hangs."""
    workers, outcomes = Workers(), {"base 0": None}
    workers.change = lambda rank, answer: {**answer, "outcomes": answer["outcomes"] | outcomes}
    hanging = asyncio.create_task(load(WorkerFiles(workers, admission), mark("base")))
    await until(lambda: workers.leases[0].is_used)
    outcomes["head of base"] = "CUDA out of memory"
    other = asyncio.create_task(load(WorkerFiles(workers, admission), mark("other")))
    await until(other.done)
    assert not hanging.done()
    hanging.cancel()


async def test_a_failed_call_fails_what_waits_and_nothing_after_it(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    workers = Workers()
    files = WorkerFiles(workers, admission)
    workers.fails = True
    with pytest.raises(EngineOutputError, match="failed to read or write a reference: lost"):
        await load(files, mark("base"))
    workers.fails = False
    await load(files, mark("base"))


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
    # Neither the second window is ever read, nor the head of the first.
    workers.change = lambda rank, answer: {**answer, "outcomes": answer["outcomes"] | never}
    never = {"head of base": None, "other 0": None, "ticket": None}
    files = WorkerFiles(workers, admission)
    headless = asyncio.create_task(load(files, mark("base")))
    unread = asyncio.create_task(load(files, mark("other")))
    unwritten = asyncio.create_task(files.wait_until_done("ticket"))
    await until(lambda: workers.num_calls > 2)
    is_gone, admission.is_stopped = True, how == "stops"
    for waiting in (headless, unread, unwritten):
        with pytest.raises(RequestError, match="shutting down" if how == "stops" else "has died"):
            await waiting
