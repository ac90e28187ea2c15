"""What `ppl-client` says while it works, on stderr: a progress bar, and a line where something happens."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from scoremode.run import OnProgress, Progress


class _LinesOnStderr(logging.Handler):
    """Not logging's own handler: that would keep the stderr of now, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"ppl-client: {' '.join(record.getMessage().split())}", file=sys.stderr, flush=True)


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Print what the package logs: servers that are waited for or dropped, journals that are gone on with."""
    logger = logging.getLogger("scoremode")
    handler, level = _LinesOnStderr(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def progress_bar(figure: Literal["ppl", "kld"], *, quiet: bool) -> Iterator[OnProgress]:
    """Show a bar with the perplexity or the mean KL divergence so far, unless `quiet`; gives what is to be told of
    every step."""
    bar = ProgressBar(
        TextColumn("windows"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} tok/s"),
        TimeRemainingColumn(),
        TextColumn(f"{figure} {{task.fields[figure]}}"),
        console=Console(stderr=True),
        disable=quiet,
    )
    with bar:
        yield _advance(bar, figure)


def _advance(bar: ProgressBar, figure: Literal["ppl", "kld"]) -> OnProgress:
    task = bar.add_task("", total=None, rate="-", figure="-")

    def advance(progress: Progress) -> None:
        elapsed = bar.tasks[0].elapsed
        num_scored = progress.num_scored - progress.num_resumed
        bar.update(
            task,
            total=progress.num_windows,
            completed=progress.windows_done,
            rate=f"{num_scored / elapsed:,.0f}" if elapsed else "-",
            figure=f"{progress.perplexity:.4f}" if figure == "ppl" else f"{progress.mean:.6f}",
        )

    return advance
