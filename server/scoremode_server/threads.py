"""Runs calls that may never end, such as reading a file of a mount that does not answer, or rendering a chat template.
Each call has a subject, such as a reference. A call that hangs delays only later calls of its subject, and never the
end of the process."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 4
"""Limit on threads per subject. Each thread reads, checks and writes about a gigabyte of files per second."""


@dataclass(frozen=True, slots=True)
class CallThreads:
    """Runs calls in the order of `submit`, at most `most` at once per subject."""

    most: int = THREADS
    _lock: Lock = field(default_factory=Lock)
    _waiting: defaultdict[str, OrderedDict[Future[Any], Callable[[], Any]]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )
    """Calls that no thread has begun, by subject. A canceled call is removed at once, because it may hold a request's
    body."""
    _num_threads: Counter[str] = field(default_factory=Counter)

    def submit(self, name: str, call: Callable[[], T]) -> Future[T]:
        """Schedule a call for the subject of that name."""
        future = Future[T]()
        with self._lock:
            self._waiting[name][future] = call
            starts = self._num_threads[name] < self.most
            if starts:
                self._num_threads[name] += 1
        future.add_done_callback(partial(self._drop, name))
        if starts:
            # A `ThreadPoolExecutor` would delay the end of the process until its threads end.
            Thread(target=self._run, args=(name,), name="scoremode-calls", daemon=True).start()
        return future

    def _drop(self, name: str, future: Future[Any]) -> None:
        with self._lock:
            if name in self._waiting:
                self._waiting[name].pop(future, None)

    def _run(self, name: str) -> None:
        while True:
            with self._lock:
                if not self._waiting[name]:
                    self._num_threads[name] -= 1
                    if not self._num_threads[name]:
                        del self._waiting[name], self._num_threads[name]
                    return
                future, call = self._waiting[name].popitem(last=False)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # Free the call and its result before this thread waits for the lock.
            del future, call


def drop_canceled(executor: Any) -> Any:
    """Have an executor drop canceled calls and their arguments at once, not only when a thread is free. Returns the
    executor."""
    submit = executor.submit

    def submit_droppable(function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        calls = [partial(function, *args, **options)]
        future: Future[T] = submit(lambda: calls.pop()())
        future.add_done_callback(lambda _: calls.clear())
        return future

    executor.submit = submit_droppable
    return executor
