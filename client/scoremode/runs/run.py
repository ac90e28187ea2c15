"""Collects the finished windows of one run over all its sessions, and reports progress."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from scoremode.metrics import exp
from scoremode.runs.journal import Journal, Measurement, Result
from scoremode.runs.pool import Pool


@dataclass(frozen=True, slots=True)
class Progress:
    windows_done: int
    num_windows: int
    num_scored: int
    """Tokens so far."""
    mean: float
    """Mean NLL, or mean KL divergence, of the tokens so far, in nats."""
    num_resumed: int = 0
    """How many tokens of `num_scored` an earlier session scored."""
    seconds: float = 0.0
    """Time since this session's run began, after the first answers of the servers."""

    @property
    def perplexity(self) -> float:
        """The perplexity of the tokens so far, if `mean` is their mean NLL."""
        return exp(self.mean)


OnProgress = Callable[[Progress], object]
StartJournal = Callable[[Measurement[Result]], Journal[Result]]


class Run(Generic[Result]):
    """Stores each finished window, writes it into the journal, and reports progress.

    It begins with the windows in the journal, and reports them once.
    """

    def __init__(
        self, measurement: Measurement[Result], journal: Journal[Result] | None, on_progress: OnProgress | None
    ) -> None:
        self._measurement = measurement
        self._journal = journal
        self._on_progress = on_progress
        self._windows: dict[int, Result] = {}
        self._num_scored = 0
        self._total = 0.0
        self._started = time.perf_counter()
        earlier = {} if journal is None else journal.windows
        for window in earlier.values():
            self._take(window)
        self._num_resumed = self._num_scored
        if earlier:
            self._report()

    def missing(self) -> Iterator[int]:
        """Indices of the windows that were not finished in an earlier session."""
        return (index for index in range(self._measurement.num_windows) if index not in self._windows)

    def store(self, window: Result) -> None:
        """Store a window that has just been finished."""
        self._take(window)
        if self._journal is not None:
            self._journal.add(window, self.seconds())
        self._report()

    def in_order(self) -> list[Result]:
        return [self._windows[index] for index in range(self._measurement.num_windows)]

    def seconds(self) -> float:
        """Time since the run began, summed over sessions."""
        before = 0.0 if self._journal is None else self._journal.seconds
        return before + time.perf_counter() - self._started

    def _take(self, window: Result) -> None:
        self._windows[window.index] = window
        self._num_scored += window.num_scored
        self._total += self._measurement.nats(window)

    def _report(self) -> None:
        if self._on_progress is not None:
            done, num_windows = len(self._windows), self._measurement.num_windows
            # Answers may have no tokens.
            mean = self._total / max(1, self._num_scored)
            seconds = time.perf_counter() - self._started
            self._on_progress(Progress(done, num_windows, self._num_scored, mean, self._num_resumed, seconds))


async def measure(
    measurement: Measurement[Result],
    pool: Pool,
    start_journal: StartJournal[Result] | None,
    on_progress: OnProgress | None,
) -> Run[Result]:
    """Measure every window that is not in the journal, on the pool's servers."""
    run = Run(measurement, None if start_journal is None else start_journal(measurement), on_progress)
    await pool.score(run.missing(), measurement.measure, run.store)
    return run
