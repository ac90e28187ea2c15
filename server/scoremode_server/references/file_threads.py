"""Threads for calls that read or write files. A call that hangs, as on a mount that does not answer, blocks later calls
for its own reference only, and not the end of the process."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 4
"""Per reference. Each reads, checks and writes about a gigabyte per second."""


@dataclass(slots=True)
class _Lane:
    calls: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class FileThreads:
    """Runs calls in the order of `submit`, at most `most` at once per reference."""

    most: int = THREADS
    _lock: Lock = field(default_factory=Lock)
    _lanes: dict[str, _Lane] = field(default_factory=dict)

    def submit(self, reference: str, call: Callable[[], T]) -> Future[T]:
        """Schedule a call for a reference."""
        future = Future[T]()
        with self._lock:
            lane = self._lanes.setdefault(reference, _Lane())
            lane.calls.append((future, call))
            starts = lane.num_threads < self.most
            lane.num_threads += starts
        if starts:
            # At the end of the process `ThreadPoolExecutor` would wait for its threads.
            Thread(target=self._run, args=(reference, lane), name="scoremode-files", daemon=True).start()
        return future

    def _run(self, reference: str, lane: _Lane) -> None:
        while True:
            with self._lock:
                if not lane.calls:
                    lane.num_threads -= 1
                    if not lane.num_threads:
                        del self._lanes[reference]
                    return
                future, call = lane.calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # Both are freed before the thread waits for the lock.
            del future, call
