"""Limits how many token sequences are in vLLM's engine at once. The others wait here.

Waiting HTTP requests alternate: each lets in a burst of sequences, then the next request does. Some space is reserved
for requests with at most one sequence in the engine.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from scoremode_server.errors import BusyError, OverdueError, TooLargeError, stopping_error

T = TypeVar("T")

POLL_SECONDS = 0.05

BURST = 1 / 6
"""How much of the engine's tokens or sequences a request takes before the next request may follow: half a step's tokens
with asynchronous scheduling. Sequences that share a prefix should enter together, because the prefix cache may lose it
while other requests enter."""

MAX_WAITING_SEQUENCES = 2**17
"""Limit on unanswered sequences of all requests together; a larger request is allowed if it is alone. Each sequence
takes three to seven kilobytes in addition to its tokens, so all take less than a gigabyte."""

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
"""When the current HTTP request exceeds its timeout, in seconds of the event loop's clock; None without a timeout."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Limits on the sequences that are in the engine at once, over all its data-parallel replicas, and on those that
    wait."""

    tokens: int
    """Limit on tokens that the engine must compute for the sequences in it. The last sequence that enters may exceed
    it."""
    sequences: int
    """Limit on sequences in the engine: twice as many as it runs in one step."""
    max_scoring_tokens: int
    """Limit on tokens of all sequences that wait or run."""
    reserved_tokens: int = 0
    """The part of `tokens` that is reserved for requests with at most one sequence in the engine."""
    request_timeout: float | None = None
    """Seconds from when an HTTP request's body was read until the request is aborted."""


@dataclass(slots=True, eq=False)
class _WaitingSequence:
    queue: "RequestQueue"
    admitted: asyncio.Future[None]
    num_tokens: int
    decodes: bool
    is_running: bool = False


class Admission:
    """Decides when each sequence enters the engine. Calls `show` with the numbers of unanswered sequences and of
    sequences in the engine when one changes.

    Once `is_stopped`, requests end with an error.
    """

    def __init__(
        self, size: EngineSize, abort: Callable[[list[str]], Awaitable[None]], show: Callable[[int, int], None]
    ) -> None:
        self.size = size
        self.num_sequences = self.num_tokens = self.num_running = 0
        self._num_computing_tokens = 0
        """Tokens that the engine must compute for the sequences that this process has in it."""
        self._num_decoding = 0
        self._decoding_seconds, self._decoding_until = 0.0, 0.0
        """Seconds in the engine, summed over all sequences outside the prefill lane, and when this sum was last
        updated."""
        self.abort = abort
        self._show = show
        self._waiting: dict[RequestQueue, deque[_WaitingSequence]] = {}
        self._queues: set[RequestQueue] = set()
        self.timeouts: set[asyncio.Timeout] = set()
        """Timeouts of the tasks that read, tokenize and score requests."""
        self._is_draining = self.is_stopped = False

    def check(self, num_sequences: int = 0, num_tokens: int = 0) -> None:
        """Refuse a request that the server has no space for, before any work on it. TooLargeError if it never fits,
        BusyError if it does not fit now, UnavailableError if the server is stopping."""
        most = self.size.max_scoring_tokens
        if self._is_draining:
            raise stopping_error()
        limit = f"this server's limit of {most} tokens (--max-scoring-tokens)"
        if num_tokens > most:
            raise TooLargeError(f"the request's {num_tokens} tokens to score exceed {limit}", "prompt")
        if self.num_tokens and self.num_tokens + max(num_tokens, 1) > most:
            raise BusyError(f"{self.num_tokens} of {limit} are taken: try again later", None)
        if self.num_sequences and self.num_sequences + max(num_sequences, 1) > MAX_WAITING_SEQUENCES:
            most = MAX_WAITING_SEQUENCES
            raise BusyError(f"{self.num_sequences} of at most {most} sequences wait: try again later", None)

    def start_clock(self) -> None:
        """Start the timeout of the current HTTP request, which covers tokenizing, scoring and answering."""
        seconds = self.size.request_timeout
        _deadline.set(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    @asynccontextmanager
    async def request(self, num_sequences: int = 0, num_tokens: int = 0) -> AsyncGenerator["RequestQueue", None]:
        """Accept an HTTP request with its sequences and tokens, or with none if `RequestQueue.add` counts each sequence
        later. The timeout cancels the current task, so no generator may yield inside this context: its consumer would
        be cancelled."""
        self.check(num_sequences, num_tokens)
        queue = RequestQueue(self)
        self._queues.add(queue)
        queue.add(num_sequences, num_tokens)
        try:
            async with self.until_stopped():
                yield queue
        finally:
            self._queues.remove(queue)
            if queue.num_sequences:
                queue.add(-queue.num_sequences, -queue.num_tokens)

    def until_stopped(self) -> "_TimeLimit":
        """Limit the time of this task's work inside the context, such as tokenizing. UnavailableError when the server
        stops, OverdueError when the request's timeout is over."""
        return _TimeLimit(self)

    @asynccontextmanager
    async def slot(
        self, queue: "RequestQueue", request_id: str, num_tokens: int, *, decodes: bool = False
    ) -> AsyncGenerator[None, None]:
        """Wait until a sequence may enter the engine, and hold its slot inside this context. The engine must compute
        `num_tokens` of its tokens. Set `decodes` outside the prefill lane: the sequence then counts in `mean_batch`."""
        waiting = _WaitingSequence(queue, asyncio.get_running_loop().create_future(), num_tokens, decodes)
        self._waiting.setdefault(queue, deque()).append(waiting)
        self.admit_waiting()
        try:
            await waiting.admitted
            if self.is_stopped:
                raise stopping_error()
            queue.entered_at = queue.entered_at or time.monotonic()
            queue.running.add(request_id)
            yield
        finally:
            queue.running.discard(request_id)
            if waiting.is_running:
                self._count(waiting, -1)
            # Other sequences may enter now, even if this task was cancelled.
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """Let in as many sequences as the engine has space for."""
        while first := self._next():
            queue, line = first.queue, self._waiting[first.queue]
            line.popleft()
            if not first.admitted.done():
                first.is_running = True
                self._count(first, 1)
                queue.burst += max(first.num_tokens / self.size.tokens, 1 / self.size.sequences)
                first.admitted.set_result(None)
            if not line or queue.burst >= BURST:
                del self._waiting[queue]
                queue.burst = 0.0
            if line:
                # After a whole burst, the request's next one comes after those of all other requests.
                self._waiting.setdefault(queue, line)

    def show(self) -> None:
        self._show(self.num_sequences, self.num_running)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give accepted requests this many seconds to finish, and end the rest with an error."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._queues:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        self.is_stopped = True
        for timeout in self.timeouts:
            if not timeout.expired():
                timeout.reschedule(0)
        await self.abort([request_id for queue in self._queues for request_id in queue.running])

    def _next(self) -> _WaitingSequence | None:
        """The next sequence that the engine has space for. The last free slot and the reserved tokens go only to
        requests with at most one sequence in the engine, which would otherwise wait for another step, and first to
        those of which one sequence waits."""
        num_free = self.size.sequences - self.num_running
        free_tokens = self.size.tokens - self._num_computing_tokens
        if num_free <= 0 or free_tokens <= 0:
            return None
        lines: Iterable[deque[_WaitingSequence]] = self._waiting.values()
        if num_free == 1 or free_tokens <= self.size.reserved_tokens:
            single = (line for line in self._waiting.values() if len(line) == 1)
            lines = (line for line in chain(single, self._waiting.values()) if line[0].queue.num_running <= 1)
        # The sequence may have been cancelled: the caller then only removes it.
        return next((line[0] for line in lines), None)

    def _count(self, sequence: _WaitingSequence, num_running: int) -> None:
        """Count a sequence that enters the engine (1) or leaves it (-1)."""
        self._num_computing_tokens += num_running * sequence.num_tokens
        self.num_running += num_running
        sequence.queue.num_running += num_running
        if sequence.decodes:
            self._count_decoding(sequence.queue, num_running)
        self.show()

    def _count_decoding(self, queue: "RequestQueue", num_running: int) -> None:
        now = time.monotonic()
        self._decoding_seconds += self._num_decoding * (now - self._decoding_until)
        self._decoding_until = now
        self._num_decoding += num_running
        moment = now, self._decoding_seconds
        queue.decoding_span = (queue.decoding_span[0] if queue.decoding_span else moment), moment


@dataclass(slots=True)
class _TimeLimit:
    """The context manager of `Admission.until_stopped`. It is a class because the event loop registers every async
    generator, and a request enters this three times."""

    admission: Admission
    timeout: asyncio.Timeout = field(init=False)

    async def __aenter__(self) -> None:
        if self.admission.is_stopped:
            raise stopping_error()
        self.timeout = await asyncio.timeout_at(_deadline.get()).__aenter__()
        self.admission.timeouts.add(self.timeout)

    async def __aexit__(self, *error: Any) -> None:
        self.admission.timeouts.remove(self.timeout)
        try:
            await self.timeout.__aexit__(*error)
        except TimeoutError:
            if self.admission.is_stopped:
                raise stopping_error() from None
            message = (
                f"the request was not answered within {self.admission.size.request_timeout:g} s (--request-timeout)"
            )
            raise OverdueError(message, None) from None


class RequestQueue:
    """The sequences of one HTTP request. Times are from `time.monotonic()`."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.accepted_at = time.monotonic()
        self.entered_at: float | None = None
        """When the request's first sequence entered the engine."""
        self.running: set[str] = set()
        """Ids of the sequences in the engine."""
        self.num_running = 0
        """How many sequences are in the engine, or were let in and are about to enter."""
        self.burst = 0.0
        """How much of the engine the current burst takes."""
        self.num_sequences = self.num_tokens = 0
        """Sequences without an answer yet, and their tokens."""
        self.num_scored = self.num_scored_tokens = self.num_cached_tokens = 0
        """Answered sequences, their tokens, and how many of these tokens were cached."""
        self.decoding_span: tuple[tuple[float, float], ...] = ()
        """Pairs of a time and `Admission._decoding_seconds` then: when the request's first sequence outside the prefill
        lane entered the engine, and when such a sequence last entered or left."""

    @property
    def mean_batch(self) -> float | None:
        """Mean number of this process's sequences outside the prefill lane in the engine, while this request had some
        there; at most as many as one step runs. None if this request had none."""
        if not self.decoding_span or self.decoding_span[0][0] == self.decoding_span[1][0]:
            return None
        (began, before), (ended, after) = self.decoding_span
        return min((after - before) / (ended - began), self.admission.size.sequences / 2)

    def add(self, num_sequences: int, num_tokens: int) -> None:
        """Count accepted sequences, or with negative numbers those that leave."""
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        self.admission.num_sequences += num_sequences
        self.admission.num_tokens += num_tokens
        self.admission.show()

    def done(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count a sequence that has its answer; `num_cached_tokens` of its tokens were not computed."""
        self.num_scored += 1
        self.num_scored_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        self.add(-1, -num_tokens)

    async def in_order(
        self, coroutines: Iterable[Coroutine[Any, Any, T]], loads: float = 1, most: int | None = None
    ) -> AsyncGenerator[T, None]:
        """Run coroutines that score one sequence each, and yield their results in order. At most `most` of them, by
        default `size.sequences` + 1, run or have a result that was not read yet. If sequences are counted when they
        begin, about `loads` times `size.tokens` tokens may have begun. If a coroutine fails or the reader stops, all
        others are cancelled, and aborted in one call, because vLLM rebuilds its queue on each call."""
        if self.num_sequences == 1:
            # Most requests have one sequence, which needs no task.
            for coroutine in coroutines:
                yield await coroutine
            return
        size = self.admission.size
        # Sequences that were counted when the request was accepted may all begin. Otherwise, leave space for other
        # requests.
        most_tokens = math.inf if self.num_sequences else loads * size.tokens
        # One more than fits the engine: the first sequence may have left it, and its result may wait for the reader.
        most_tasks = size.sequences + 1 if most is None else most
        tasks: deque[asyncio.Task[T]] = deque()
        try:
            for coroutine in coroutines:
                tasks.append(asyncio.create_task(coroutine))
                while tasks and (len(tasks) >= most_tasks or self.num_tokens > most_tokens):
                    yield await _first(tasks)
            while tasks:
                yield await _first(tasks)
        finally:
            try:
                if self.running:
                    await self.admission.abort(list(self.running))
            finally:
                await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended. If all have already ended, it does not yield to the event loop."""
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    if not all(task.done() for task in tasks):
        await ended


async def _first(tasks: deque[asyncio.Task[T]]) -> T:
    # Awaiting the task itself would cancel it when the reader is cancelled, before the others are aborted.
    await asyncio.wait((tasks[0],))
    return tasks.popleft().result()
