"""What `ppl-client compare` does."""

import argparse
import sys
from pathlib import Path

from scoremode._printable import printable
from scoremode.accuracy.compare_tasks import TaskComparison, compare_tasks
from scoremode.accuracy.samples import load_tasks
from scoremode.comparison.accuracy_tables import tasks_as_csv, tasks_as_text
from scoremode.comparison.card import card
from scoremode.comparison.compare import compare
from scoremode.comparison.engine_log import with_logs
from scoremode.comparison.figures import RunComparison
from scoremode.comparison.run_file import load_runs
from scoremode.comparison.tables import as_csv, as_markdown, as_text
from scoremode.errors import RunError


def run_compare(options: argparse.Namespace) -> None:
    """Compare the runs that the options name: the report and the plots first, the table on stdout last. RunError if a
    run or a task's samples cannot be read or compared."""
    comparison, tasks, folders = None, None, {}
    runs = load_runs(options.runs, options.labels)
    if runs:
        comparison = compare(runs, num_resamples=options.resamples, seed=options.seed)
        comparison = with_logs(comparison, options.llama_cpp, options.qbench)
    for place, each in enumerate(options.tasks or ()):
        label, separator, folder = each.partition("=")
        if not separator:
            label, folder = runs[place].label, each
        if printable(label) in folders:
            raise RunError(f"--tasks: two folders are called {label!r}: give them names of their own")
        folders[printable(label)] = Path(folder)
    if folders:
        models = {label: load_tasks(each, options.task_metric, options.task_filter) for label, each in folders.items()}
        tasks = compare_tasks(models, options.smallest_difference / 100)
    try:
        # Each takes a second to import, and is not always asked for.
        if comparison is not None and options.plots is not None:
            from scoremode.comparison.plots import write_plots

            write_plots(comparison, options.plots)
        if comparison is not None and options.html is not None:
            from scoremode.comparison.report import write_report

            write_report(comparison, options.html, tasks=tasks)
    finally:
        sys.stdout.write(_table(options, comparison, tasks))


def _table(options: argparse.Namespace, comparison: RunComparison | None, tasks: TaskComparison | None) -> str:
    if options.csv:
        return as_csv(comparison, () if tasks is None else tasks_as_csv(tasks))
    is_markdown = options.markdown or options.card
    parts = []
    if comparison is not None:
        parts.append((card if options.card else as_markdown if is_markdown else as_text)(comparison))
    if tasks is not None:
        parts.append(tasks_as_text(tasks, is_markdown=is_markdown))
    return "\n".join(parts)
