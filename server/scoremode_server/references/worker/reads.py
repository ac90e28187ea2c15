"""Reads files for windows of references in threads of a worker, so that neither steps nor calls wait for a file."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from scoremode_server.references.worker.orders import OVERDUE
from scoremode_server.threads import CallThreads

SECONDS_TO_READ = 120
"""Time limit for a file, from when a thread begins to read it."""


@dataclass(slots=True)
class _Read:
    reference: str
    ordered_at: float
    begun_at: float | None = None
    result: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class FileReads:
    """Reads of files, done or ordered, by ticket."""

    threads: CallThreads
    _reads: dict[str, _Read] = field(default_factory=dict)
    _begun_at: dict[str, float] = field(default_factory=dict)
    """When a thread last began to read a file, by reference."""

    def __len__(self) -> int:
        return len(self._reads)

    def begin(self, ticket: str, reference: str, call: Callable[[], object]) -> None:
        """Have a thread read a file of a reference by `call`, and store its result."""
        read = self._reads[ticket] = _Read(reference, time.monotonic())

        def attempt() -> object:
            read.begun_at = self._begun_at[reference] = time.monotonic()
            return call()

        read.result = self.threads.submit(reference, attempt)

    def forget(self, ticket: str) -> None:
        """Drop the result of a read, or cancel the read."""
        if (read := self._reads.pop(ticket, None)) is not None:
            read.result.cancel()

    def find(self, ticket: str) -> Any:
        """The result of a read; None if the read is not done or has failed."""
        read = self._reads.get(ticket)
        is_read = read is not None and read.result.done() and read.result.exception() is None
        return read.result.result() if read is not None and is_read else None

    def outcome(self, ticket: str) -> str | None:
        """Why a file could not be read, `OVERDUE` if it was not read in time; "" if it was read; None until then."""
        if (read := self._reads.get(ticket)) is None:
            return None
        if read.result.done():
            return outcome_of(read.result)
        # A read that waits for a thread is overdue only if its reference's threads have begun no other read in that
        # time.
        since = read.begun_at or max(read.ordered_at, self._begun_at.get(read.reference, 0))
        return OVERDUE if time.monotonic() > since + SECONDS_TO_READ else None


def outcome_of(result: Future[Any]) -> str:
    """Why a call failed; "" if it did not fail."""
    return "" if (error := result.exception()) is None else str(error) or repr(error)
