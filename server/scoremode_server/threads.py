"""Threads for calls that may never end, such as reading a file of a mount that does not answer, or rendering a chat
template. They hold up later calls of the same subject only, and not the end of the process."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 4
"""Per subject. Each reads, checks and writes about a gigabyte of files per second."""


@dataclass(frozen=True, slots=True)
class CallThreads:
    """Runs calls in the order of `submit`, at most `most` at once per subject, such as a reference."""

    most: int = THREADS
    _lock: Lock = field(default_factory=Lock)
    _waiting: defaultdict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """Calls that no thread has begun, by subject."""
    _num_threads: Counter[str] = field(default_factory=Counter)

    def submit(self, name: str, call: Callable[[], T]) -> Future[T]:
        """Schedule a call for the subject of that name."""
        future = Future[T]()
        with self._lock:
            self._waiting[name].append((future, call))
            starts = self._num_threads[name] < self.most
            if starts:
                self._num_threads[name] += 1
        if starts:
            # At the end of the process `ThreadPoolExecutor` would wait for its threads.
            Thread(target=self._run, args=(name,), name="scoremode-calls", daemon=True).start()
        return future

    def _run(self, name: str) -> None:
        while True:
            with self._lock:
                if not self._waiting[name]:
                    self._num_threads[name] -= 1
                    if not self._num_threads[name]:
                        del self._waiting[name], self._num_threads[name]
                    return
                future, call = self._waiting[name].popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # Both are freed before the thread waits for the lock.
            del future, call
