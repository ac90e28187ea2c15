"""Files that engine workers read and write for windows of references. An API server orders them before it sends a
window to the engine and waits for them here, so no step of the engine waits for a file.

References whose LM heads do not fit at once take turns. A turn ends after some seconds, once another reference waits
for the memory: no more of its windows enter the engine, and when the last has left, the other head replaces this one.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.errors import EngineOutputError, RequestError, UnavailableError, engine_has_died, stopping
from scoremode_server.prefix_cache.admission import Admission, Gate
from scoremode_server.references.manifest import HeadFormat
from scoremode_server.vllm_patches.row_spec import WindowMark
from scoremode_server.vllm_patches.worker_extension import call_engines

SECONDS_TO_READ = 120
"""Time for a worker to read a window or an LM head."""

TURN_SECONDS = 10.0
"""How long a reference keeps its head in memory while another waits. Replacing a head takes half a second or so, in
which neither is compared."""

IDLE_SECONDS = 0.5
"""Time without requests for its windows after which a reference releases its head; the memory is kept until needed."""

HEADS_AT_ONCE = 2
"""LM heads that workers read or keep on the host until there is memory for them on the device."""

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
class _Reference:
    """The windows of a reference on one engine."""

    mark: WindowMark
    """Of one of them."""
    head: HeadFormat
    gate: Gate
    """Open while the LM head is in its place."""
    num_windows: int = 0
    num_read: int = 0
    """Those that were read, and wait or are in the engine."""
    used: float = 0.0
    """When one of these last left."""
    num_tokens: int = 0
    """Of windows that workers read or keep."""
    next_to_read: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when workers keep a window no longer."""
    turns: asyncio.Task[None] | None = None

    async def reserve(self, num_tokens: int, most: int) -> None:
        """Wait until workers keep few enough tokens to read `num_tokens` more: at most `most` in all."""
        async with self.next_to_read:
            while self.num_tokens and self.num_tokens + num_tokens > most:
                self.has_left.clear()
                await self.has_left.wait()
            self.num_tokens += num_tokens


@dataclass(slots=True)
class _Engine:
    """What the workers of one engine are to do."""

    rank: int
    references: dict[str, _Reference] = field(default_factory=dict)
    """By the key of the LM head."""
    head_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HEADS_AT_ONCE))
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    """For the next call: see `WorkerWindows.exchange`."""
    is_contended: bool = False
    """Whether a head waits for memory."""

    def has_work(self) -> bool:
        """Forget references without windows, and return whether workers must be called again."""
        for key, reference in list(self.references.items()):
            if not reference.num_windows and (reference.turns is None or reference.turns.done()):
                del self.references[key]
        return bool(self.references or self.orders)

    def is_turn_over(self, reference: _Reference, began: float) -> bool:
        """Whether a reference's turn ends."""
        now = time.monotonic()
        if not reference.num_read and now - reference.used > IDLE_SECONDS:
            return True
        # Only one reference at a time gives up its memory: none ends its turn while another is leaving.
        is_one_leaving = any(each.gate.num_running and not each.gate.is_open for each in self.references.values())
        return self.is_contended and now - began >= TURN_SECONDS and not is_one_leaving


class WorkerFiles:
    """Orders files of the workers of all engines."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client = client
        self._admission = admission
        self._holder = secrets.token_hex(8)
        self._outcomes: dict[asyncio.Future[Exception | None], tuple[str, int | None]] = {}
        """What tasks wait for: a ticket, or the key of a head, and the rank of the engine, None for any."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        parallel = client.vllm_config.parallel_config
        num_engines = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
        self._engines = [_Engine(rank) for rank in range(num_engines)]

    @asynccontextmanager
    async def loaded(
        self, mark: WindowMark, head: HeadFormat, num_tokens: int, rank: int | None = None
    ) -> AsyncGenerator[tuple[Gate, int | None], None]:
        """Have one engine's workers read and keep a window of `num_tokens` tokens and its reference's LM head. The
        engine is `rank`, or the one with the fewest windows if the request names none.

        Yields:
            The gate that admits the window once the LM head is in place, or refuses it if the head cannot be read; and
            the engine's rank, None if there is only one engine.

        Raises:
            UnreadableFileError: a file is missing, or not what was written.
            UnavailableError: a file was not read in time, or the engine has died.
        """
        engines = self._engines
        if rank is not None and not 0 <= rank < len(engines):
            raise RequestError(f"X-data-parallel-rank: {rank} is not from 0 to {len(engines) - 1}", None)
        num_windows = [sum(each.num_windows for each in engine.references.values()) for engine in engines]
        engine = engines[num_windows.index(min(num_windows)) if rank is None else rank]
        reference = engine.references.setdefault(mark.head, _Reference(mark, head, Gate(self._admission)))
        reference.num_windows += 1
        try:
            await reference.reserve(num_tokens, STEPS_READ_AHEAD * self._admission.size.tokens)
            engine.orders.append(("read window", asdict(mark)))
            try:
                await self._read(mark.ticket, f"window {mark.index}", engine, reference)
                reference.num_read += 1
                if reference.turns is None or reference.turns.done():
                    reference.turns = asyncio.create_task(self._take_turns(engine, reference))
                try:
                    yield reference.gate, engine.rank if len(engines) > 1 else None
                finally:
                    reference.num_read -= 1
                    reference.used = time.monotonic()
            finally:
                engine.orders.append(("forget window", mark.ticket))
                reference.num_tokens -= num_tokens
                reference.has_left.set()
        finally:
            reference.num_windows -= 1

    async def _take_turns(self, engine: _Engine, reference: _Reference) -> None:
        while reference.num_read:
            await self._take_turn(engine, reference)
            # Refused windows need a moment to leave.
            await asyncio.sleep(POLL_SECONDS)

    async def _take_turn(self, engine: _Engine, reference: _Reference) -> None:
        """Have a reference's head placed, and let its windows in until its turn is over."""
        key, gate, is_usable = reference.mark.head, reference.gate, False
        try:
            async with engine.head_slots:
                # Hold no head while another waits for memory: API servers holding it alternately would never free it.
                while engine.is_contended:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
                engine.orders.append(("hold head", asdict(reference.mark), self._holder, reference.head.model_dump()))
                await self._read(key, "the LM head", engine, reference)
                engine.orders.append(("place head", key))
                await self.wait_until_done(key, engine.rank)
            is_usable = True
            gate.open()
            began = time.monotonic()
            while not engine.is_turn_over(reference, began):  # noqa: ASYNC110
                await asyncio.sleep(MAX_POLL_SECONDS)
            gate.is_open = False
            while gate.num_running:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        except Exception as error:
            failure = error
            self._admission.refuse(gate, lambda: failure)
        engine.orders.append(("release head", key, self._holder, is_usable))
        self._wake.set()

    async def _read(self, ticket: str, what: str, engine: _Engine, reference: _Reference) -> None:
        try:
            async with asyncio.timeout(SECONDS_TO_READ):
                await self.wait_until_done(ticket, engine.rank)
        except TimeoutError:
            late = f"{what} was not read within {SECONDS_TO_READ} s; does its file system answer?"
            raise UnavailableError(f"reference {reference.mark.reference!r}: {late}", "reference") from None

    async def wait_until_done(self, ticket: str, rank: int | None = None) -> None:
        """Wait until all workers of engine `rank` have done what was ordered; if None, one worker of any engine."""
        outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._outcomes[outcome] = ticket, rank
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            failure = await outcome
        finally:
            del self._outcomes[outcome]
        if failure is not None:
            raise failure

    async def _run(self) -> None:
        try:
            await self._call_workers()
            return
        except EngineDeadError:
            failure: Exception = engine_has_died()
        except RequestError as error:
            failure = error
        except Exception as error:
            failure = EngineOutputError(f"the engine's workers failed to read or write a reference: {error}")
        for engine in self._engines:
            engine.is_contended = False
        for outcome in self._outcomes:
            if not outcome.done():
                outcome.set_result(failure)

    async def _call_workers(self) -> None:
        """Tell the workers what was ordered, and ask how far they are, while there is anything to do."""
        first, pause, known = self._client.vllm_config.parallel_config.data_parallel_index, POLL_SECONDS, None
        while any(engine.has_work() for engine in self._engines) or self._outcomes:
            if self._admission.is_stopped:
                raise stopping()
            self._wake.clear()
            # Answers apply only to what was asked in this call: a head may get another order before they arrive.
            asked, orders = self._outcomes.copy(), {}
            for engine in self._engines:
                tickets = {ticket for ticket, rank in asked.values() if rank in (None, engine.rank)}
                orders[first + engine.rank] = engine.orders, list(tickets)
                engine.orders = []
            answers = await self._answers(orders)
            for engine, of_ranks in zip(self._engines, answers, strict=True):
                engine.is_contended = any(answer["is_contended"] for answer in of_ranks)
            for outcome, (ticket, rank) in asked.items():
                of_ranks = list(chain(*answers)) if rank is None else answers[rank]
                states = [answer["outcomes"].get(ticket) for answer in of_ranks]
                if outcome.done():
                    continue
                if failure := next(filter(None, states), None):
                    outcome.set_result(UnreadableFileError(failure))
                elif "" in states and (rank is None or None not in states):
                    outcome.set_result(None)
            pause = POLL_SECONDS if answers != known else min(2 * pause, MAX_POLL_SECONDS)
            known = answers
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _answers(self, orders: dict[int, Any]) -> list[list[dict[str, Any]]]:
        """Of the workers with an LM head, engine by engine."""
        call = asyncio.create_task(call_engines(self._client, "scoremode_exchange", orders))
        while not (await asyncio.wait((call,), timeout=ALIVE_SECONDS))[0]:
            if self._client.errored:
                call.cancel()
                raise EngineDeadError
        return [[answer for answer in of_engine if answer is not None] for of_engine in call.result()]
