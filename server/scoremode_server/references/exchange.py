"""Files that engine workers read and write for windows of references, and the reference that each engine compares with.
An API server orders files before it sends a window to the engine and waits for them here, so no step of the engine
waits for a file.

An engine compares with one reference at a time. Windows of another one are refused; `LEASE_SECONDS` after the first
refusal the held reference gets no new windows either, so that another can be held once its last window has left.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.admission import Admission
from scoremode_server.errors import (
    RETRY_AFTER_SECONDS,
    BusyError,
    EngineOutputError,
    RequestError,
    UnavailableError,
    engine_dead_error,
    stopping_error,
)
from scoremode_server.references.files.manifest import HeadFormat
from scoremode_server.references.worker.orders import (
    IN_USE,
    ForgetWindow,
    HoldReference,
    Order,
    ReadWindow,
    ReleaseReference,
    WindowMark,
)
from scoremode_server.vllm_compat.engine_client import call_engines

SECONDS_TO_READ = 120
"""Time for a worker to read a window or an LM head."""

LEASE_SECONDS = 10.0
"""How long a reference gets new windows while another one is refused. Replacing the LM head takes half a second."""

REMEMBERED_SECONDS = 2 * RETRY_AFTER_SECONDS
"""How long a refused reference counts as waiting: its client comes back in half of that time, if at all."""

STEPS_READ_AHEAD = 3
"""Tokens of a reference's windows that workers may read or keep at once, as a multiple of `EngineSize.tokens`: some are
in the engine, and some wait for it."""

ALIVE_SECONDS = 1.0
"""How often a pending call checks whether the engine has died: vLLM then drops its calls without an answer."""

POLL_SECONDS = 0.005
"""Pause before workers are asked for progress again; doubles up to `MAX_POLL_SECONDS` while nothing changes."""

MAX_POLL_SECONDS = 0.1


class UnreadableFileError(Exception):
    """A worker could not read or write a file that a window needs; the message says why."""


@dataclass(slots=True)
class _Engine:
    """Orders for the workers of one engine, and the reference that it compares with, as far as this API server
    knows."""

    rank: int
    orders: list[Order] = field(default_factory=list)
    """For the next call: see `WorkerWindows.exchange`."""
    key: str = ""
    """Of the reference's LM head."""
    is_placed: bool = False
    """Whether its LM head is on the device, and stays there."""
    num_windows: int = 0
    """Windows of this API server that hold the reference."""
    num_tokens: int = 0
    """Tokens of those that workers read or keep."""
    next_to_read: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when workers keep a window no longer."""
    refused_since: float = 0.0
    """When another reference was first refused, and until when that is remembered."""
    refused_until: float = 0.0
    num_refused: int = 0
    """How often its workers refused a reference, for any API server."""

    def admits(self, key: str) -> bool:
        """Whether a new window of a reference may hold it now."""
        if key != self.key:
            return not self.num_windows
        now = time.monotonic()
        return now >= self.refused_until or now < self.refused_since + LEASE_SECONDS

    def remember_refusal(self) -> None:
        """Another reference was refused."""
        now = time.monotonic()
        if now >= self.refused_until:
            self.refused_since = now
        self.refused_until = now + REMEMBERED_SECONDS

    async def reserve(self, num_tokens: int, most: int) -> None:
        """Wait until workers keep few enough tokens to read `num_tokens` more: at most `most` in all."""
        async with self.next_to_read:
            while self.num_tokens and self.num_tokens + num_tokens > most:
                self.has_left.clear()
                await self.has_left.wait()
            self.num_tokens += num_tokens


class WorkerFiles:
    """Orders files of the workers of all engines."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client, self._admission = client, admission
        self._holder = secrets.token_hex(8)
        self._outcomes: dict[asyncio.Future[None], tuple[str, int | None]] = {}
        """What tasks wait for: a ticket, or the key of a head, and the rank of the engine, None for any."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        parallel = client.vllm_config.parallel_config
        num_engines = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
        self._engines = [_Engine(rank) for rank in range(num_engines)]

    @asynccontextmanager
    async def loaded(
        self, mark: WindowMark, head: HeadFormat, num_tokens: int, rank: int | None = None
    ) -> AsyncGenerator[int | None, None]:
        """Have one engine's workers read and keep a window of `num_tokens` tokens, and its reference's LM head on the
        device. The engine is `rank`, or if the request names none, the one with the fewest windows among those that
        compare with no other reference.

        Yields:
            The engine's rank, None if there is only one engine.

        Raises:
            BusyError: the engines compare with another reference.
            UnreadableFileError: a file is missing, or not what was written.
            UnavailableError: a file was not read in time, or the engine has died.
        """
        engine = self._choose(mark, rank)
        if engine.key != mark.head:
            engine.key, engine.refused_until = mark.head, 0.0
        engine.num_windows += 1
        try:
            await engine.reserve(num_tokens, STEPS_READ_AHEAD * self._admission.size.tokens)
            engine.orders.append(ReadWindow(mark))
            try:
                if not engine.is_placed:
                    engine.orders.append(HoldReference(mark, self._holder, head.model_dump()))
                    await self._wait_until_read(mark.head, "the LM head", engine, mark)
                    engine.is_placed = True
                await self._wait_until_read(mark.ticket, f"window {mark.index}", engine, mark)
                yield engine.rank if len(self._engines) > 1 else None
            finally:
                engine.orders.append(ForgetWindow(mark.ticket))
                engine.num_tokens -= num_tokens
                engine.has_left.set()
        finally:
            engine.num_windows -= 1
            if not engine.num_windows:
                engine.is_placed = False
                engine.orders.append(ReleaseReference(mark.head, self._holder))
                self._wake.set()

    def _choose(self, mark: WindowMark, rank: int | None) -> _Engine:
        if rank is not None and not 0 <= rank < len(self._engines):
            raise RequestError(f"X-data-parallel-rank: {rank} is not from 0 to {len(self._engines) - 1}", None)
        engines = self._engines if rank is None else [self._engines[rank]]
        if admitting := [engine for engine in engines if engine.admits(mark.head)]:
            return min(admitting, key=lambda engine: engine.num_windows)
        for engine in engines:
            # A reference whose time is over does not wait for itself.
            if engine.key != mark.head:
                engine.remember_refusal()
        raise _in_use()

    async def _wait_until_read(self, ticket: str, what: str, engine: _Engine, mark: WindowMark) -> None:
        try:
            async with asyncio.timeout(SECONDS_TO_READ):
                await self.wait_until_done(ticket, engine.rank)
        except TimeoutError:
            raise UnavailableError(
                f"reference {mark.reference!r}: {what} was not read within {SECONDS_TO_READ} s; does its file system "
                "answer?",
                "reference",
            ) from None

    async def wait_until_done(self, ticket: str, rank: int | None = None) -> None:
        """Wait until all workers of engine `rank` have done what was ordered; if None, one worker of any engine."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcomes[outcome] = ticket, rank
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            await outcome
        finally:
            del self._outcomes[outcome]

    async def _run(self) -> None:
        try:
            await self._call_workers()
            return
        except EngineDeadError:
            failure: Exception = engine_dead_error()
        except RequestError as error:
            failure = error
        except Exception as error:
            failure = EngineOutputError(f"the engine's workers failed to read or write a reference: {error}")
        for outcome in self._outcomes:
            if not outcome.done():
                outcome.set_exception(failure)

    async def _call_workers(self) -> None:
        """Tell the workers what was ordered, and ask how far they are, while there is anything to do."""
        first, pause, known = self._client.vllm_config.parallel_config.data_parallel_index, POLL_SECONDS, None
        while any(engine.num_windows or engine.orders for engine in self._engines) or self._outcomes:
            if self._admission.is_stopped:
                raise stopping_error()
            self._wake.clear()
            # Answers apply only to what was asked in this call: a head may get another order before they arrive.
            asked, orders = self._outcomes.copy(), {}
            for engine in self._engines:
                tickets = {ticket for ticket, rank in asked.values() if rank in (None, engine.rank)}
                orders[first + engine.rank] = msgspec.to_builtins(engine.orders), list(tickets)
                engine.orders = []
            answers = await self._answers(orders)
            for engine, of_ranks in zip(self._engines, answers, strict=True):
                num_refused = max(answer["num_refused"] for answer in of_ranks)
                if num_refused > engine.num_refused and engine.is_placed:
                    engine.remember_refusal()
                engine.num_refused = num_refused
            for outcome, (ticket, rank) in asked.items():
                of_ranks = list(chain(*answers)) if rank is None else answers[rank]
                states = [answer["outcomes"].get(ticket) for answer in of_ranks]
                if outcome.done():
                    continue
                if failure := next(filter(None, states), None):
                    outcome.set_exception(_in_use() if failure == IN_USE else UnreadableFileError(failure))
                elif "" in states and (rank is None or None not in states):
                    outcome.set_result(None)
            pause = POLL_SECONDS if answers != known else min(2 * pause, MAX_POLL_SECONDS)
            known = answers
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _answers(self, orders: dict[int, Any]) -> list[list[dict[str, Any]]]:
        """Send orders, and collect the answers of the workers with an LM head, engine by engine."""
        call = asyncio.create_task(call_engines(self._client, "scoremode_exchange", orders))
        while not (await asyncio.wait((call,), timeout=ALIVE_SECONDS))[0]:
            if self._client.errored:
                call.cancel()
                raise EngineDeadError
        return [[answer for answer in of_engine if answer is not None] for of_engine in call.result()]


def _in_use() -> BusyError:
    return BusyError("reference: the engine compares with another reference; try again later", "reference")
