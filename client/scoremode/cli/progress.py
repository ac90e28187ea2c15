"""Shows on stderr what `ppl-client` is doing: a progress bar, and one line per event."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBar

from scoremode._texts import printable
from scoremode.corpus import CorpusProgress, OnCorpusProgress
from scoremode.runs import OnBytes, OnProgress, Progress

SECONDS_PER_LINE = 30.0
"""Seconds between progress lines if stderr is not a terminal. A terminal shows a bar instead."""

_FIGURES: dict[str, Callable[[Progress], str]] = {
    "ppl": lambda progress: f"{progress.perplexity:.4f}",
    "kld": lambda progress: f"{progress.mean:.6f}",
    "tokens": lambda progress: f"{progress.num_scored:,}",
}

_log = logging.getLogger(__name__)


class _LinesOnStderr(logging.Handler):
    """Prints log records to the current `sys.stderr`, which a progress bar replaces. logging's own handler would print
    to the stream from before."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"ppl-client: {printable(' '.join(record.getMessage().split()))}", file=sys.stderr, flush=True)


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Print the package's log messages, such as those on unreachable servers and resumed journals."""
    logger = logging.getLogger("scoremode")
    handler, level = _LinesOnStderr(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _rate(num_tokens: int, seconds: float) -> str:
    """Format tokens per second. `num_tokens` must not count tokens from before a resume."""
    return f"{num_tokens / seconds:,.0f}" if num_tokens and seconds else "-"


def progress_bar(figure: Literal["ppl", "kld", "tokens"], *, quiet: bool) -> AbstractContextManager[OnProgress]:
    """Show a progress bar, unless `quiet`: of windows with the perplexity or mean KL divergence so far, or of answers
    with their number of tokens. Entering it gives the function that advances it."""

    def fields(progress: Progress) -> dict[str, Any]:
        return {
            "total": progress.num_windows,
            "completed": progress.windows_done,
            "rate": _rate(progress.num_scored - progress.num_resumed, progress.seconds),
            "figure": _FIGURES[figure](progress),
        }

    counted = "answers" if figure == "tokens" else "windows"
    return _bar(counted, "{task.fields[rate]} tok/s", TimeRemainingColumn(), figure, fields, quiet=quiet)


def corpus_bar(*, quiet: bool) -> AbstractContextManager[OnCorpusProgress]:
    """Show a progress bar of files with the documents and perplexity so far, unless `quiet`. Entering it gives the
    function that advances it."""

    def fields(progress: CorpusProgress) -> dict[str, Any]:
        return {
            "total": progress.num_files,
            "completed": progress.files_done,
            "rate": _rate(progress.num_tokens - progress.num_tokens_resumed, progress.seconds),
            "figure": "-" if progress.perplexity is None else f"{progress.perplexity:.4f}",
            "documents": f"{progress.num_documents:,}",
        }

    middle = "{task.fields[documents]} documents, {task.fields[rate]} tok/s"
    return _bar("files", middle, TimeElapsedColumn(), "ppl", fields, quiet=quiet)


@contextmanager
def export_bar(*, quiet: bool) -> Iterator[OnBytes]:
    """Show a progress bar of bytes, unless `quiet`. Entering it gives the function that advances it."""
    columns = (BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _shown(*columns, quiet=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda written, size: bar.update(task, completed=written, total=size)


@contextmanager
def _bar(
    counted: str,
    middle: str,
    time: ProgressColumn,
    figure: str,
    fields: Callable[[Any], dict[str, Any]],
    *,
    quiet: bool,
) -> Iterator[Callable[[Any], None]]:
    """Show a bar, or log lines if stderr is not a terminal. Entering it gives the function that advances it."""
    columns = (TextColumn(counted), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn(middle), time)
    next_line = SECONDS_PER_LINE

    def advance(progress: Any) -> None:
        nonlocal next_line
        shown, elapsed = fields(progress), task.elapsed or 0.0
        bar.update(task.id, **shown)
        if elapsed > next_line and not quiet and not bar.console.is_terminal:
            next_line = elapsed + SECONDS_PER_LINE
            left = "" if task.time_remaining is None else f", about {task.time_remaining:.0f} s left"
            _log.info("%s: %d of %s after %.0f s%s", counted, task.completed, shown["total"], elapsed, left)

    with _shown(*columns, TextColumn(f"{figure} {{task.fields[figure]}}"), quiet=quiet) as bar:
        bar.add_task("", total=None, documents="0", rate="-", figure="-")
        [task] = bar.tasks
        yield advance


def _shown(*columns: ProgressColumn, quiet: bool) -> ProgressBar:
    """Make a bar that disappears when it ends, because the command then prints its results or an error."""
    console = Console(stderr=True)
    return ProgressBar(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
