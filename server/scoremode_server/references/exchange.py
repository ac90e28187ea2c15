"""Tells engine workers which files of references to read and drop, and follows each engine's lease. An API server has a
window's files read, waits for them here, and only then sends the window, so no step of the engine waits for a file.

An engine compares with one reference at a time: see `worker/lease.py`. Windows of other references wait here. Only
windows in the engine use the lease. Windows that are still waiting when it ends wait for the next one.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
from vllm.engine.protocol import EngineClient
from vllm.utils import random_uuid
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.admission import Admission
from scoremode_server.errors import (
    BusyError,
    EngineOutputError,
    RequestError,
    UnavailableError,
    engine_dead_error,
    stopping_error,
)
from scoremode_server.references.files.manifest import HeadFormat
from scoremode_server.references.worker import reads
from scoremode_server.references.worker.orders import (
    OVERDUE,
    Forget,
    LeaseCall,
    LeaseState,
    Order,
    ReadHead,
    ReadWindow,
    WindowMark,
)
from scoremode_server.vllm_compat.engine_client import call_engines

STEPS_READ_AHEAD = 3
"""Limit on tokens of a reference's windows that workers read or hold at once, as a multiple of the tokens that the
engine takes at once (`EngineSize.tokens`). It is more than 1 so that windows are ready when the engine has space."""

HEADS_READ_AHEAD = 4
"""Limit on LM heads that workers read or hold on the host at once per API server. The head of a model of 8B parameters
takes a gigabyte."""

ALIVE_SECONDS = 1.0
"""Seconds between checks whether the engine has died. vLLM never answers a call to a dead engine."""

POLL_SECONDS = 0.005
"""Pause before workers are called again. It doubles up to `MAX_POLL_SECONDS` while nothing changes."""

MAX_POLL_SECONDS = 0.1

RETRY_SECONDS = 1.0
"""Pause after a failed call."""


class UnreadableFileError(Exception):
    """A worker could not read or write a file that a window needs; the message says why."""


class LeaseEndedError(Exception):
    """A window may not enter the engine, because its reference's lease has ended."""


@dataclass(slots=True, eq=False)
class _Comparison:
    """The windows of one reference that this API server compares in one engine, now or soon."""

    mark: WindowMark
    """The mark of one of these windows; the marks of all name the same reference and LM head."""
    head: HeadFormat
    num_windows: int = 0
    num_inside: int = 0
    """How many of these windows are in the engine."""
    num_tokens: int = 0
    """Tokens of these windows that workers read or hold."""
    ticket: str = ""
    """The ticket under which workers read the LM head to the host; empty before the head is ordered, and once it is on
    the device."""
    is_read: bool = False
    """Whether all ranks have read the LM head."""
    failure: Exception | None = None
    """Why no window can enter the engine."""
    may_enter: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while windows may enter the engine, and permanently once there is a `failure`."""
    next_to_read: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when workers drop a window."""

    async def wait(self, seconds: float | None) -> None:
        """Wait until windows may enter the engine. BusyError after `seconds`. Raises the error given to `fail`, if
        any."""
        try:
            async with asyncio.timeout(seconds):
                await self.may_enter.wait()
        except TimeoutError:
            raise BusyError(
                f"reference: the engine has compared with other references for {seconds:g} s: try again later",
                "reference",
            ) from None
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        """Raise an error in all waiting windows."""
        self.failure = failure
        self.may_enter.set()

    @asynccontextmanager
    async def reserved(self, num_tokens: int, most: int) -> AsyncGenerator[None, None]:
        """Wait until workers have space for `num_tokens` more tokens within the limit `most`, and reserve it."""
        async with self.next_to_read:
            while self.num_tokens and self.num_tokens + num_tokens > most:
                self.has_left.clear()
                await self.has_left.wait()
            self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_tokens -= num_tokens
            self.has_left.set()

    @property
    def is_open(self) -> bool:
        """Whether windows may enter the engine."""
        return self.may_enter.is_set() and self.failure is None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a window as in the engine. LeaseEndedError if the lease has ended."""
        if not self.is_open:
            raise LeaseEndedError
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1


@dataclass(slots=True)
class _Engine:
    """Orders for the workers of one engine, and its lease as the workers last described it."""

    rank: int
    orders: list[Order] = field(default_factory=list)
    """Orders to send with the next call: see `WorkerWindows.exchange`."""
    comparisons: dict[str, _Comparison] = field(default_factory=dict)
    """Comparisons by the key of their reference's LM head."""
    may_be_noted: bool = False
    """Whether the last call may have told workers that this API server wants or uses a lease. If so, the workers must
    be called again, to learn when this API server no longer does."""
    lease: LeaseState = field(default_factory=lambda: LeaseState(key="", is_granted=False, is_used=False, waiting=[]))

    @property
    def is_busy(self) -> bool:
        """Whether the workers must be called."""
        return bool(self.orders or self.comparisons or self.may_be_noted)

    @property
    def num_windows(self) -> int:
        return sum(comparison.num_windows for comparison in self.comparisons.values())

    def compares_with_others(self, key: str) -> bool:
        """Whether windows of another reference may be in the engine."""
        return self.lease["is_used"] and self.lease["key"] != key

    def message(self, server: str, tickets: set[str]) -> tuple[Any, ...]:
        """Make the next message to the workers: orders, tickets to look up, and this API server's side of the lease."""
        self._order_heads()
        wanted = {}
        for key, comparison in self.comparisons.items():
            if comparison.failure is None and comparison.num_windows > comparison.num_inside:
                wanted[key] = comparison.ticket if comparison.is_read else ""
            tickets |= {key, comparison.ticket} - {""}
        is_used = any(comparison.num_inside for comparison in self.comparisons.values())
        # Windows may enter while the call is under way.
        is_held = is_used or any(comparison.is_open for comparison in self.comparisons.values())
        self.may_be_noted = bool(wanted) or is_held
        call = LeaseCall(server, asyncio.get_running_loop().time(), wanted, is_held, is_used)
        return (*map(msgspec.to_builtins, (self.orders, tickets, call)),)

    def _order_heads(self) -> None:
        """Have the workers read the LM heads that they need next."""
        num_heads = sum(bool(comparison.ticket) for comparison in self.comparisons.values())
        for key in dict.fromkeys((*self.lease["waiting"], *self.comparisons)):
            comparison = self.comparisons.get(key)
            if comparison is None or comparison.ticket or key == self.lease["key"] or num_heads >= HEADS_READ_AHEAD:
                continue
            num_heads += 1
            comparison.ticket = random_uuid()
            self.orders.append(ReadHead(comparison.mark, comparison.ticket, comparison.head.model_dump()))

    def note(self, answers: list[dict[str, Any]]) -> None:
        """Let windows enter the engine if the workers' answers allow it, or fail the windows whose LM head cannot be
        read."""
        self.lease = answers[0]["lease"]
        for key, comparison in self.comparisons.items():
            # The device may have this head left from an earlier lease, so its presence is not enough.
            has_lease = self.lease["key"] == key
            if failure := _failure(answers, comparison.ticket) or (has_lease and _failure(answers, key)):
                comparison.fail(_file_error(failure, comparison.mark, "the LM head"))
            comparison.is_read = bool(comparison.ticket) and _is_done(answers, comparison.ticket)
            is_placed = has_lease and _is_done(answers, key)
            if is_placed and comparison.ticket:
                self.forget_head(comparison)
            if self.lease["is_granted"] and is_placed:
                comparison.may_enter.set()
            elif comparison.failure is None:
                comparison.may_enter.clear()

    def forget_head(self, comparison: _Comparison) -> None:
        """Have the workers drop the LM head from the host."""
        if comparison.ticket:
            self.orders.append(Forget(comparison.ticket))
        comparison.ticket, comparison.is_read = "", False


class WorkerFiles:
    """Has the workers of all engines read and drop files."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client, self._admission = client, admission
        self._server = secrets.token_hex(8)
        self._outcomes: dict[asyncio.Future[None], tuple[str, int | None]] = {}
        """For each waiting task, the ticket that it waits for and the engine's rank; None for any engine."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        parallel = client.vllm_config.parallel_config
        num_engines = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
        self._first = parallel.data_parallel_index
        self._engines = [_Engine(rank) for rank in range(num_engines)]

    @asynccontextmanager
    async def loaded(
        self, mark: WindowMark, head: HeadFormat, num_tokens: int, rank: int | None = None, wait: float | None = None
    ) -> AsyncGenerator[tuple[int | None, Callable[[], AbstractContextManager[None]]], None]:
        """Have one engine's workers read and hold a window of `num_tokens` tokens, and wait until its reference has the
        lease. Without `rank` the engine is the one with the fewest windows among those that compare with no other
        reference.

        Yields:
            The engine's rank, None if there is only one engine; and a function that makes a context. Enter it while the
            window is in the engine. It raises LeaseEndedError if the lease has ended.

        Raises:
            BusyError: the engine has compared with other references for `wait` seconds.
            UnreadableFileError: a file is missing, or not what was written.
            UnavailableError: a file was not read in time, or the engine has died.
        """
        engine = self._choose(mark, rank)
        comparison = engine.comparisons.setdefault(mark.head, _Comparison(mark, head))
        comparison.num_windows += 1
        self._call_soon()
        try:
            if engine.compares_with_others(mark.head):
                await comparison.wait(wait)
            async with comparison.reserved(num_tokens, STEPS_READ_AHEAD * self._admission.size.tokens):
                engine.orders.append(ReadWindow(mark))
                try:
                    await self._wait_until_read(mark, engine)
                    # Reading may take longer than a lease. The window then waits for the next one.
                    await comparison.wait(wait)
                    yield engine.rank if len(self._engines) > 1 else None, comparison.inside
                finally:
                    engine.orders.append(Forget(mark.ticket))
        finally:
            comparison.num_windows -= 1
            if not comparison.num_windows:
                engine.forget_head(engine.comparisons.pop(mark.head))
                self._call_soon()

    def _choose(self, mark: WindowMark, rank: int | None) -> _Engine:
        if rank is not None and not 0 <= rank < len(self._engines):
            raise RequestError(f"X-data-parallel-rank: {rank} is not from 0 to {len(self._engines) - 1}", None)
        engines = self._engines if rank is None else [self._engines[rank]]
        return min(engines, key=lambda engine: (engine.compares_with_others(mark.head), engine.num_windows))

    async def _wait_until_read(self, mark: WindowMark, engine: _Engine) -> None:
        try:
            await self.wait_until_done(mark.ticket, engine.rank)
        except UnreadableFileError as error:
            raise _file_error(str(error), mark, f"window {mark.index}") from None

    async def wait_until_done(self, ticket: str, rank: int | None = None) -> None:
        """Wait until all workers of engine `rank` have done what was ordered under a ticket; if `rank` is None, until
        one worker of any engine has done it. UnreadableFileError if a worker could not do it."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcomes[outcome] = ticket, rank
        self._call_soon()
        try:
            await outcome
        finally:
            del self._outcomes[outcome]

    def _call_soon(self) -> None:
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._call_workers())

    async def _call_workers(self) -> None:
        """Send orders to the workers and collect outcomes, until there is nothing left to do."""
        pause, last_answers = POLL_SECONDS, None
        while self._outcomes or any(engine.is_busy for engine in self._engines):
            self._wake.clear()
            try:
                answers = await self._exchange()
            except RequestError as error:
                self._fail(error)
                return
            except Exception as error:
                self._fail(EngineOutputError(f"the engine's workers failed to read or write a reference: {error}"))
                # Other API servers wait until the workers learn that this one's windows have left.
                await asyncio.sleep(RETRY_SECONDS)
                continue
            pause = POLL_SECONDS if answers != last_answers else min(2 * pause, MAX_POLL_SECONDS)
            last_answers = answers
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
        for engine in self._engines:
            # No later answer will report that the lease is free, so assume now that it is.
            engine.lease["is_used"] = False

    async def _exchange(self) -> list[list[dict[str, Any]]]:
        """Send each engine a message, and note the answers of its workers."""
        if self._admission.is_stopped:
            raise stopping_error()
        pending, sent, messages = self._outcomes.copy(), [], {}
        for engine in self._engines:
            tickets = {ticket for ticket, rank in pending.values() if rank in (None, engine.rank)}
            messages[self._first + engine.rank] = engine.message(self._server, tickets)
            sent.append(engine.orders)
            engine.orders = []
        try:
            answers = await self._answers(messages)
        except BaseException:
            for engine, orders in zip(self._engines, sent, strict=True):
                # The workers may have noted what this call said.
                engine.may_be_noted = True
                # This call's error reaches the tasks that wait for reads. The workers must still drop what they have
                # read.
                engine.orders[:0] = [order for order in orders if isinstance(order, Forget)]
            raise
        for engine, rank_answers in zip(self._engines, answers, strict=True):
            engine.note(rank_answers)
        for outcome, (ticket, rank) in pending.items():
            rank_answers = list(chain(*answers)) if rank is None else answers[rank]
            if outcome.done():
                continue
            if failure := _failure(rank_answers, ticket):
                outcome.set_exception(UnreadableFileError(failure))
            elif _is_done(rank_answers, ticket, any if rank is None else all):
                outcome.set_result(None)
        return answers

    async def _answers(self, messages: dict[int, tuple[Any, ...]]) -> list[list[dict[str, Any]]]:
        """Send messages, and collect the answers of the workers with an LM head, engine by engine."""
        call = asyncio.create_task(call_engines(self._client, "scoremode_exchange", messages))
        try:
            while not (await asyncio.wait((call,), timeout=ALIVE_SECONDS))[0]:
                if self._client.errored:
                    call.cancel()
                    raise EngineDeadError
            return [[answer for answer in results if answer is not None] for results in call.result()]
        except EngineDeadError:
            raise engine_dead_error() from None

    def _fail(self, failure: Exception) -> None:
        """Raise an error in all waiting tasks and windows."""
        for outcome in self._outcomes:
            if not outcome.done():
                outcome.set_exception(failure)
        for engine in self._engines:
            for comparison in engine.comparisons.values():
                comparison.fail(failure)


def _failure(answers: list[dict[str, Any]], ticket: str) -> str | None:
    """Why a worker could not do what was ordered under a ticket; None if no worker failed."""
    return next(filter(None, (answer["outcomes"].get(ticket) for answer in answers)), None)


def _is_done(answers: list[dict[str, Any]], ticket: str, quantifier: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Whether all workers, or with `any` at least one, have done what was ordered under a ticket."""
    return quantifier(answer["outcomes"].get(ticket) == "" for answer in answers)


def _file_error(failure: str, mark: WindowMark, what: str) -> Exception:
    if failure != OVERDUE:
        return UnreadableFileError(failure)
    return UnavailableError(
        f"reference {mark.reference!r}: {what} was not read within {reads.SECONDS_TO_READ} s; does its file system "
        "answer?",
        "reference",
    )
