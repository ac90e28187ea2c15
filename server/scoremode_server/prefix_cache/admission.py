"""Admission: the engine is handed the sequences that it can use soon, and the rest waits here.

vLLM's queue is first come, first served. Whoever sends thousands of sequences at once would make all others wait for
all of them, and vLLM walks through its whole queue for each one that is aborted. So at most one step's tokens wait in
the engine besides those that it is at. Here HTTP requests take turns, a sequence each, and some room is kept for those
that have none in the engine: a request's size is its own problem.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from scoremode_server.errors import BusyError, OverdueError, TooLargeError, stopping

T = TypeVar("T")

UNREAD_SECONDS = 1
"""A reader that has not come for more after so long is not waited for when the server stops."""

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What an engine is handed, all of its replicas together."""

    tokens: int
    """Tokens to compute, of all sequences that are in it. The last one may go beyond."""
    sequences: int
    """Sequences that are in it at most."""
    max_scoring_tokens: int
    """Tokens of all sequences that may be here at once, waiting or running."""
    kept_tokens: int = 0
    """Of `tokens`, those that are kept for small requests."""
    request_timeout: float | None = None
    """Seconds until an HTTP request is given up."""


class Gate:
    """Lets sequences into the engine while it is open.

    Attributes:
        num_running: sequences that it let in, and that have not left.
    """

    def __init__(self, admission: "Admission", on_idle: Callable[[], None]) -> None:
        """
        Args:
            admission: of the server.
            on_idle: called when the last of the sequences has left.
        """
        self.num_running = 0
        self.is_open = False
        self._admission = admission
        self._on_idle = on_idle

    def open(self) -> None:
        """Let sequences in from now on."""
        self.is_open = True
        self._admission.give_turns()

    def close(self) -> None:
        """Let no more in."""
        self.is_open = False

    def count(self, num_running: int) -> None:
        """Sequences go in, or with a negative number out."""
        self.num_running += num_running
        if not self.num_running:
            self._on_idle()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """End all that wait here with an error."""
        self._admission.refuse(self, error)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A sequence that waits."""

    given: asyncio.Future[None]
    num_tokens: int
    gate: Gate | None

    @property
    def can_be_given(self) -> bool:
        # One that was cancelled or refused is only to be removed.
        return self.gate is None or self.gate.is_open or self.given.done()


class Admission:
    """Hands sequences to the engine in turns. Counts are right at every moment; `show` gets the number of sequences and
    of the running ones whenever they change.

    Attributes:
        num_sequences: accepted, and without an answer yet.
        num_tokens: of these sequences.
        num_running: those of them that are in the engine.
        is_stopped: requests are ended without an answer, because the server stops.
    """

    def __init__(
        self, size: EngineSize, abort: Callable[[list[str]], Awaitable[None]], show: Callable[[int, int], None]
    ) -> None:
        self.size = size
        self.num_sequences = self.num_tokens = self.num_running = 0
        self._num_computing = 0
        """Tokens that the engine must compute, as far as is known here."""
        self.abort = abort
        self._show = show
        self._turns: OrderedDict[RequestQueue, deque[_Turn]] = OrderedDict()
        self._queues: set[RequestQueue] = set()
        self._not_accepted: set[asyncio.Task[Any]] = set()
        """Tasks that read and tokenize requests."""
        self._is_draining = self.is_stopped = False

    def check(self, num_tokens: int = 0) -> None:
        """Refuse a request of so many tokens that the server has no room for, before anything is done for it.

        Raises:
            TooLargeError: it has more than may ever be here.
            BusyError: others are here.
            UnavailableError: the server stops.
        """
        most = self.size.max_scoring_tokens
        if self._is_draining:
            raise stopping()
        if num_tokens > most:
            raise TooLargeError(
                f"the request has {num_tokens} tokens to score, and this server takes at most {most} at once "
                "(--max-scoring-tokens)",
                "prompt",
            )
        if self.num_tokens and self.num_tokens + max(num_tokens, 1) > most:
            raise BusyError(
                f"{self.num_tokens} tokens are waiting to be scored, of at most {most} (--max-scoring-tokens)", None
            )

    @asynccontextmanager
    async def request(self, num_sequences: int = 0, num_tokens: int = 0) -> AsyncGenerator["RequestQueue", None]:
        """Accept an HTTP request with all of its sequences, or with none and it adds each as it begins it, until they
        are scored. The task that enters it is the one whose time is limited: never enter it in a generator that yields
        within it, whose reader would be cancelled.

        Raises:
            OverdueError: it took longer than it may.
        """
        self.check(num_tokens)
        queue = RequestQueue(self)
        self._queues.add(queue)
        queue.add(num_sequences, num_tokens)
        try:
            async with asyncio.timeout(self.size.request_timeout) as limit:
                yield queue
        except TimeoutError:
            if not limit.expired():
                # A file system's, say.
                raise
            message = f"the request was not scored within {self.size.request_timeout:g} s (--request-timeout)"
            raise OverdueError(message, None) from None
        finally:
            self._queues.remove(queue)
            if queue.num_sequences:
                queue.add(-queue.num_sequences, -queue.num_tokens)

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Let this task do something for a request that is not accepted yet, such as tokenizing it, unless the server
        stops first.

        Raises:
            UnavailableError: it does.
        """
        if self.is_stopped:
            raise stopping()
        task = asyncio.current_task()
        assert task is not None
        self._not_accepted.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Unless its client has left as well.
            if self.is_stopped and not task.uncancel():
                raise stopping() from None
            raise
        finally:
            self._not_accepted.remove(task)

    async def enter(self, queue: "RequestQueue", num_tokens: int, gate: Gate | None = None) -> None:
        """Wait for a request's turn to have a sequence in the engine, of which so many tokens must be computed.

        Raises:
            UnavailableError: the server stops.
        """
        if self.is_stopped:
            raise stopping()
        if not self._turns and (gate is None or gate.is_open) and self._next((queue,)):
            self._count(queue, num_tokens, 1, gate)
            return
        turn = _Turn(asyncio.get_running_loop().create_future(), num_tokens, gate)
        self._turns.setdefault(queue, deque()).append(turn)
        self.give_turns()
        try:
            await turn.given
        except asyncio.CancelledError:
            if turn.given.done() and not turn.given.cancelled() and turn.given.exception() is None:
                self._count(queue, -num_tokens, -1, gate)
            # Turns of cancelled tasks must not keep others waiting.
            self.give_turns()
            raise
        if self.is_stopped:
            self._count(queue, -num_tokens, -1, gate)
            raise stopping()

    def leave(self, queue: "RequestQueue", num_tokens: int, gate: Gate | None = None) -> None:
        """A sequence is no longer in the engine: others go in its place."""
        self._count(queue, -num_tokens, -1, gate)
        self.give_turns()

    def give_turns(self) -> None:
        """Let in what the engine has room for."""
        while queue := self._next(
            queue for queue, turns in self._turns.items() if any(turn.can_be_given for turn in turns)
        ):
            turns = self._turns.pop(queue)
            turn = next(turn for turn in turns if turn.can_be_given)
            turns.remove(turn)
            if turns:
                self._turns[queue] = turns
            if not turn.given.done():
                self._count(queue, turn.num_tokens, 1, turn.gate)
                turn.given.set_result(None)

    def refuse(self, gate: Gate, error: Callable[[], Exception]) -> None:
        """End all that wait at a gate with an error."""
        for turns in self._turns.values():
            for turn in turns:
                if turn.gate is gate and not turn.given.done():
                    turn.given.set_exception(error())
        self.give_turns()

    def show(self) -> None:
        """Let the counts be seen."""
        self._show(self.num_sequences, self.num_running)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, let those that are here finish for so long, and end the others with an error."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # Time alone makes the last ones unread.
                while not all(queue.is_unread for queue in self._queues):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        self.is_stopped = True
        for task in self._not_accepted:
            task.cancel()
        for turn in [turn for turns in self._turns.values() for turn in turns if not turn.given.done()]:
            turn.given.set_exception(stopping())
        self._turns.clear()
        await self.abort([request_id for queue in self._queues for request_id in queue.running])

    def _next(self, queues: "Iterable[RequestQueue]") -> "RequestQueue | None":
        """The first of these that the engine has room for. The last place and the last tokens are for requests with at
        most one sequence there: whoever comes after a full step waits for another one."""
        num_free = self.size.sequences - self.num_running
        free_tokens = self.size.tokens - self._num_computing
        if num_free <= 0 or free_tokens <= 0:
            return None
        is_kept = num_free == 1 or free_tokens <= self.size.kept_tokens
        return next((queue for queue in queues if not is_kept or queue.num_running <= 1), None)

    def _count(self, queue: "RequestQueue", num_tokens: int, num_running: int, gate: Gate | None) -> None:
        self._num_computing += num_tokens
        self.num_running += num_running
        queue.num_running += num_running
        if gate is not None:
            gate.count(num_running)
        self.show()


Accept = Callable[[str, int, int], AbstractAsyncContextManager["RequestQueue"]]
"""Accepts an HTTP request of an id with its sequences and tokens, as `Admission.request` does."""


class RequestQueue:
    """The sequences of one HTTP request on their way through the engine.

    Attributes:
        running: ids of those that are in the engine.
        num_running: how many are there, or have a place there.
        num_sequences: those without an answer yet.
        num_tokens: of these.
        accepted: when it was accepted, by `time.monotonic()`.
        entered: when the first one went into the engine.
        num_scored: those that have an answer.
        num_scored_tokens: of these.
        num_cached_tokens: of these, those that were not computed for them.
    """

    def __init__(self, admission: Admission) -> None:
        self.running: set[str] = set()
        self.num_sequences = self.num_tokens = self.num_running = 0
        self._admission = admission
        self.accepted = time.monotonic()
        self.entered: float | None = None
        self._tasks: deque[asyncio.Task[Any]] = deque()
        """Those that were begun, and whose results the reader has not taken."""
        self._taken: float | None = None
        """When the reader took a result, unless it waits for the next one."""
        self.num_scored = self.num_scored_tokens = self.num_cached_tokens = 0

    def add(self, num_sequences: int, num_tokens: int) -> None:
        """Count sequences in, or with negative numbers out."""
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        self._admission.num_sequences += num_sequences
        self._admission.num_tokens += num_tokens
        self._admission.show()

    def done(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A sequence has its answer; so many of its tokens were not computed for it."""
        self.num_scored += 1
        self.num_scored_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        self.add(-1, -num_tokens)

    async def in_order(self, coroutines: Iterable[Coroutine[Any, Any, T]], loads: int = 1) -> AsyncGenerator[T, None]:
        """The results of scoring sequences, in order. As many are started as the engine has use for, with `loads` times
        the tokens. Of a request that was accepted without any, each counts itself in as it is taken from `coroutines`.

        A failure, or a reader that stops, cancels the others, and aborts those in the engine in one call: vLLM walks
        through its queue for each call.
        """
        if self.num_sequences == 1:
            # Most requests are one sequence, which needs no task of its own.
            for coroutine in coroutines:
                yield await coroutine
            return
        size = self._admission.size
        # Those that were counted in with the request may all begin; those that count from now on leave room for others.
        most_tokens = math.inf if self.num_sequences else loads * size.tokens
        try:
            for coroutine in coroutines:
                self._tasks.append(asyncio.create_task(coroutine))
                # One more than the engine takes: the first may have left it, and wait for its reader.
                while self._tasks and (len(self._tasks) > size.sequences or self.num_tokens > most_tokens):
                    yield await self._first()
            while self._tasks:
                yield await self._first()
        finally:
            self._taken = None
            try:
                if self.running:
                    await self._admission.abort(list(self.running))
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _first(self) -> Any:
        self._taken = None
        # Not awaited itself: it would be cancelled together with the reader, before the others.
        await asyncio.wait((self._tasks[0],))
        result = self._tasks.popleft().result()
        self._taken = time.monotonic()
        return result

    @property
    def is_unread(self) -> bool:
        """Whether all that was begun is scored, and the reader has not come for it for some time."""
        has_stopped = self._taken is not None and time.monotonic() - self._taken > UNREAD_SECONDS
        return has_stopped and all(task.done() for task in self._tasks)

    @property
    def is_stopped(self) -> bool:
        """Whether it is ended without an answer, because the server stops."""
        return self._admission.is_stopped

    async def enter(self, request_id: str, num_tokens: int, num_known: int = 0, gate: Gate | None = None) -> None:
        """Wait for a turn to have a sequence in the engine, of whose tokens `num_known` need not be computed, and until
        its gate is open.

        Raises:
            UnavailableError: the server stops.
        """
        await self._admission.enter(self, num_tokens - num_known, gate)
        self.entered = self.entered or time.monotonic()
        self.running.add(request_id)

    def leave(self, request_id: str, num_tokens: int, num_known: int = 0, gate: Gate | None = None) -> None:
        """A sequence that entered is no longer in the engine."""
        self.running.remove(request_id)
        self._admission.leave(self, num_tokens - num_known, gate)
