"""Files that engine workers read and write for windows of references. An API server orders them before it sends a
window to the engine and waits for them here, so no step of the engine waits for a file.

References whose LM heads do not fit at once take turns. A turn ends after some seconds, once another reference waits
for the memory: no more of its windows enter the engine, and when the last has left, the other head replaces this one.
"""

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.errors import EngineOutputError, RequestError, UnavailableError, engine_has_died, stopping
from scoremode_server.prefix_cache.admission import Admission, Gate
from scoremode_server.references.manifest import HeadFormat
from scoremode_server.vllm_patches.reference_heads import FAILED
from scoremode_server.vllm_patches.reference_windows import Orders
from scoremode_server.vllm_patches.row_spec import WindowMark
from scoremode_server.vllm_patches.worker_extension import call_engines

SECONDS_TO_READ = 120
"""Time for a worker to read a window or an LM head."""

TURN_SECONDS = 10.0
"""How long a reference keeps its head in memory while another waits. Replacing a head takes half a second or so, in
which neither is compared."""

IDLE_SECONDS = 0.5
"""Time without requests for its windows after which a reference releases its head; the memory is kept until needed."""

HEADS_IN_LINE = 2
"""LM heads that workers read or keep on the host until there is memory for them on the device."""

SLOW_SECONDS = 10.0
"""Time after which a head that is still being read does not count among them: a file may never answer."""

STEPS_READ = 3
"""Times what the engine is handed: tokens of the windows of a reference that workers keep or read at a time. Some are
in the engine, and some wait for it."""

ALIVE_SECONDS = 1.0
"""After which an engine that does not answer is asked whether it has died: vLLM drops its calls then."""

POLL_SECONDS = 0.005
"""After which workers are asked how far they are; without news, then after twice as long, up to `MAX_POLL_SECONDS`."""

MAX_POLL_SECONDS = 0.1

Failure = Callable[[], Exception]
"""Makes the exception: each that waits raises its own."""

HeadState = Literal["absent", "reading", "read", "waiting", "placed", "leaving"]
"""`reading` and `read` on the host, `waiting` for memory, `placed`, and `leaving` until the engine has no window."""


class UnreadableFileError(Exception):
    """A worker could not read a file that a window needs; the message says why."""


def _outcome() -> asyncio.Future[None]:
    outcome = asyncio.get_running_loop().create_future()
    # Whoever waits for it may be cancelled, and leave an exception that nobody has seen.
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
    return outcome


def _settle(outcome: asyncio.Future[None], failure: Failure | None) -> None:
    if outcome.done():
        return
    if failure is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(failure())


@dataclass(slots=True)
class _Window:
    mark: WindowMark
    num_tokens: int
    outcome: asyncio.Future[None] = field(default_factory=_outcome)
    ordered: float | None = None
    """When it was."""


@dataclass(slots=True)
class _Head:
    """The LM head of a reference on one engine."""

    mark: WindowMark
    """Of one of the reference's windows."""
    format: HeadFormat
    gate: Gate
    """Of the reference's windows; open while the head is in its place."""
    num_windows: int = 0
    """Those that need it, waiting or in the engine."""
    num_ready: int = 0
    """Those of them that were read."""
    used: float = 0.0
    """When a window that was read last needed it."""
    state: HeadState = "absent"
    since: float = field(default_factory=time.monotonic)

    def enter(self, state: HeadState) -> None:
        self.state, self.since = state, time.monotonic()

    def fail(self, failure: Failure) -> None:
        """End all windows that wait for it."""
        self.gate.admission.refuse(self.gate, failure)
        self.enter("absent")


@dataclass(slots=True)
class _Engine:
    """The windows that are read for one engine, and the heads that it needs."""

    admission: Admission
    wake: Callable[[], None]
    windows: dict[str, _Window] = field(default_factory=dict)
    """By ticket."""
    heads: OrderedDict[str, _Head] = field(default_factory=OrderedDict)
    """By key; in the order in which they are to have their turns."""
    orders: Orders = field(default_factory=Orders)
    """For the next call."""
    _is_contended: bool = False

    @property
    def has_work(self) -> bool:
        """Whether workers must be called again."""
        return bool(self.windows or self.heads or any(asdict(self.orders).values()))

    def head(self, mark: WindowMark, head: HeadFormat) -> _Head:
        if mark.head not in self.heads:
            self.heads[mark.head] = _Head(mark, head, Gate(self.admission, self.wake))
        return self.heads[mark.head]

    def next_orders(self) -> Orders:
        now = time.monotonic()
        self._order_reads(now)
        for head in list(self.heads.values()):
            self._advance(head, now)
        orders, self.orders = self.orders, Orders()
        asked = (window for window in self.windows.values() if window.ordered and not window.outcome.done())
        orders.files = [window.mark.ticket for window in asked]
        orders.heads = list(self.heads)
        return orders

    def _order_reads(self, now: float) -> None:
        most, num_kept = STEPS_READ * self.admission.size.tokens, Counter[str]()
        for window in self.windows.values():
            mark = window.mark
            if window.ordered is None:
                if num_kept[mark.head] and num_kept[mark.head] + window.num_tokens > most:
                    # Later ones wait as well.
                    num_kept[mark.head] = most
                    continue
                window.ordered = now
                self.orders.read.append(asdict(mark))
            elif now - window.ordered > SECONDS_TO_READ:
                _settle(window.outcome, partial(_late, f"window {mark.index}", mark.reference))
            num_kept[mark.head] += window.num_tokens

    def _advance(self, head: _Head, now: float) -> None:
        key = head.mark.head
        if head.num_ready:
            head.used = now
        match head.state:
            case "absent" if not head.num_windows:
                del self.heads[key]
            case "absent" if self._may_read(now):
                self.orders.read_heads.append((asdict(head.mark), head.format.model_dump()))
                head.enter("reading")
            case "reading" if now - head.since > SECONDS_TO_READ:
                self.orders.forget_heads.append(key)
                head.fail(partial(_late, "the LM head", head.mark.reference))
            case "reading" | "read" if not head.num_windows:
                self.orders.forget_heads.append(key)
                head.enter("absent")
            case "read" if head.num_ready:
                self.orders.hold.append(key)
                head.enter("waiting")
            case "placed" if self._must_leave(head, now):
                head.gate.is_open = False
                head.enter("leaving")
        if head.state == "leaving" and not head.gate.num_running:
            self.orders.release.append(key)
            head.enter("absent")
            self.heads.move_to_end(key)

    def _may_read(self, now: float) -> bool:
        in_line = (
            head.state == "waiting" or (head.state in ("reading", "read") and now - head.since < SLOW_SECONDS)
            for head in self.heads.values()
        )
        return sum(in_line) < HEADS_IN_LINE

    def _must_leave(self, head: _Head, now: float) -> bool:
        if now - max(head.used, head.since) > IDLE_SECONDS:
            return True
        # One at a time frees its memory.
        is_next = all(each.state != "leaving" for each in self.heads.values()) and head.since == min(
            each.since for each in self.heads.values() if each.state == "placed"
        )
        return self._is_contended and is_next and now - head.since >= TURN_SECONDS

    def learn(self, answers: list[dict[str, Any]]) -> None:
        """Take what the workers with an LM head answered."""
        for window in self.windows.values():
            outcomes = [answer["files"].get(window.mark.ticket) for answer in answers]
            if failure := next(filter(None, outcomes), None):
                _settle(window.outcome, partial(UnreadableFileError, failure))
            elif None not in outcomes:
                _settle(window.outcome, None)
        for key, head in self.heads.items():
            if head.state in ("reading", "waiting"):
                self._learn_of_head(head, {answer["heads"].get(key) for answer in answers})
        self._is_contended = any(answer["is_contended"] for answer in answers)

    def _learn_of_head(self, head: _Head, states: set[str | None]) -> None:
        key = head.mark.head
        if failure := next((state for state in states if state and state.startswith(FAILED)), None):
            self.orders.release.append(key)
            self.orders.forget_heads.append(key)
            head.fail(partial(UnreadableFileError, failure.removeprefix(FAILED)))
        elif "absent" in states:
            # Another API server has dropped it, or another head has its memory.
            head.enter("absent")
        elif head.state == "reading" and states == {"read"}:
            head.enter("read")
        elif head.state == "waiting" and states == {"placed"}:
            head.enter("placed")
            head.gate.open()

    def end(self, failure: Failure) -> None:
        """The engine answers no longer: end all that waits."""
        for window in self.windows.values():
            _settle(window.outcome, failure)
        for head in self.heads.values():
            head.fail(failure)
            # A window that has not come to its gate yet ends in the engine.
            head.gate.open()
        self.windows.clear()
        self.heads.clear()
        self.orders = Orders()


class WorkerFiles:
    """Orders files of the workers of all engines."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self._client = client
        self._admission = admission
        self._holder = secrets.token_hex(8)
        self._written: dict[asyncio.Future[None], str] = {}
        """Tickets of what is waited for; two recordings of one reference wait for the same LM head."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        parallel = client.vllm_config.parallel_config
        num_engines = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
        self._engines = [_Engine(admission, self._wake.set) for _ in range(num_engines)]

    @asynccontextmanager
    async def loaded(
        self, mark: WindowMark, head: HeadFormat, num_tokens: int, rank: int | None = None
    ) -> AsyncGenerator[tuple[Gate, int | None], None]:
        """Have a window of so many tokens read on one engine, and kept there; and its reference's head as well. The
        engine is that of `rank`, where the request has chosen one.

        Yields:
            The gate where the window waits until the head is in its place, and which refuses it if the head cannot be
            read; the rank of the engine, None where there is one alone.

        Raises:
            UnreadableFileError: a file is missing, or not what was written.
            RequestError: a file was not read in time, or the engine has died (503); or there is no such engine.
        """
        engines = self._engines
        if rank is None:
            num_windows = [sum(each.num_windows for each in engine.heads.values()) for engine in engines]
            rank = num_windows.index(min(num_windows))
        elif not 0 <= rank < len(engines):
            raise RequestError(f"X-data-parallel-rank: {rank} is not one of {len(engines)} ranks", None)
        engine = engines[rank]
        needed, window = engine.head(mark, head), _Window(mark, num_tokens)
        engine.windows[mark.ticket] = window
        needed.num_windows += 1
        self._call_workers()
        try:
            await window.outcome
            needed.num_ready += 1
            self._call_workers()
            try:
                yield needed.gate, rank if len(engines) > 1 else None
            finally:
                needed.num_ready -= 1
                needed.used = time.monotonic()
        finally:
            needed.num_windows -= 1
            if engine.windows.pop(mark.ticket, None) and window.ordered:
                engine.orders.forget.append(mark.ticket)

    async def written(self, ticket: str, seconds: float) -> str | None:
        """Wait until a worker has written a file. Returns why it was not, if so.

        Raises:
            TimeoutError: it was not within this time.
            RequestError: the engine has died (503).
        """
        outcome = _outcome()
        self._written[outcome] = ticket
        self._call_workers()
        try:
            async with asyncio.timeout(seconds):
                await outcome
        except UnreadableFileError as error:
            return str(error)
        finally:
            del self._written[outcome]
        return None

    def _call_workers(self) -> None:
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        engines, pause = self._engines, POLL_SECONDS
        first, known = self._client.vllm_config.parallel_config.data_parallel_index, None
        try:
            while self._written or any(engine.has_work for engine in engines):
                if self._admission.is_stopped:
                    self._end(stopping)
                    return
                is_asked = self._wake.is_set()
                self._wake.clear()
                orders = {first + rank: asdict(engine.next_orders()) for rank, engine in enumerate(engines)}
                for each in orders.values():
                    each["files"] += set(self._written.values())
                answers = await self._answers(orders)
                for engine, of_engine in zip(engines, answers, strict=True):
                    # Of the ranks with an LM head.
                    engine.learn([answer for answer in of_engine if answer is not None])
                self._learn_of_written(answers)
                pause = POLL_SECONDS if is_asked or answers != known else min(2 * pause, MAX_POLL_SECONDS)
                known = answers
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        except EngineDeadError:
            self._end(engine_has_died)
        except Exception as error:
            self._end(partial(EngineOutputError, f"the engine's workers do not read references: {error}"))

    async def _answers(self, orders: dict[int, dict[str, Any]]) -> list[list[Any]]:
        call = asyncio.create_task(call_engines(self._client, "scoremode_exchange", self._holder, orders))
        while not (await asyncio.wait((call,), timeout=ALIVE_SECONDS))[0]:
            if self._client.errored:
                call.cancel()
                raise EngineDeadError
        return call.result()

    def _learn_of_written(self, answers: list[list[Any]]) -> None:
        for answer in (answer for of_engine in answers for answer in of_engine if answer is not None):
            for outcome, ticket in self._written.items():
                if (failure := answer["files"].get(ticket)) is not None:
                    _settle(outcome, partial(UnreadableFileError, failure) if failure else None)

    def _end(self, failure: Failure) -> None:
        for engine in self._engines:
            engine.end(failure)
        for outcome in self._written:
            _settle(outcome, failure)


def _late(what: str, reference: str) -> UnavailableError:
    return UnavailableError(
        f"reference {reference!r}: {what} was not read within {SECONDS_TO_READ} s; does its file system answer?",
        "reference",
    )
