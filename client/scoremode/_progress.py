"""What `ppl-client` says while it works, on stderr: a progress bar, and a line where something happens."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from scoremode._printable import printable
from scoremode.corpus import CorpusProgress, OnCorpusProgress
from scoremode.run import OnProgress, Progress


class _LinesOnStderr(logging.Handler):
    """Not logging's own handler: that would keep the stderr of now, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"ppl-client: {printable(' '.join(record.getMessage().split()))}", file=sys.stderr, flush=True)


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
    with _shown(bar):
        yield _advance(bar, figure)


@contextmanager
def corpus_bar(*, quiet: bool) -> Iterator[OnCorpusProgress]:
    """Show a bar of files, with the documents and the perplexity so far, unless `quiet`; gives what is to be told of
    every step."""
    bar = ProgressBar(
        TextColumn("files"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[documents]} documents, {task.fields[rate]} tok/s"),
        TimeElapsedColumn(),
        TextColumn("ppl {task.fields[figure]}"),
        console=Console(stderr=True),
        disable=quiet,
    )
    task = bar.add_task("", total=None, documents="0", rate="-", figure="-")

    def advance(progress: CorpusProgress) -> None:
        elapsed = bar.tasks[0].elapsed
        num_tokens = progress.num_tokens - progress.num_tokens_resumed
        bar.update(
            task,
            total=progress.num_files,
            completed=progress.files_done,
            documents=f"{progress.num_documents:,}",
            rate=f"{num_tokens / elapsed:,.0f}" if elapsed else "-",
            figure="-" if progress.perplexity is None else f"{progress.perplexity:.4f}",
        )

    with _shown(bar):
        yield advance


@contextmanager
def _shown(bar: ProgressBar) -> Iterator[None]:
    """While it is shown. One that never had a figure is not left above an error."""
    bar.start()
    try:
        yield
    except BaseException:
        if bar.tasks[0].fields["figure"] == "-":
            # The bar's own `stop` leaves it on a terminal, and an empty line elsewhere.
            bar.live.transient = True
            bar.live.stop()
        else:
            bar.stop()
        raise
    bar.stop()


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
