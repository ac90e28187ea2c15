"""What `ppl-client compare` does."""

import argparse
import sys
from pathlib import Path

from scoremode._printable import printable
from scoremode.accuracy.compare_tasks import TaskComparison, compare_tasks
from scoremode.accuracy.samples import load_tasks
from scoremode.comparison.accuracy_tables import tasks_as_csv, tasks_as_markdown, tasks_as_text
from scoremode.comparison.card import card
from scoremode.comparison.compare import RunComparison, compare
from scoremode.comparison.run_file import load_runs
from scoremode.comparison.tables import as_csv, as_markdown, as_text


def run_compare(options: argparse.Namespace) -> None:
    """Compare the runs that the options name: the report and the plots first, the table on stdout last.

    Raises:
        RunError: a run or a task's samples cannot be read, or cannot be compared.
        OSError: a file cannot be written.
    """
    comparison = None
    if options.runs:
        runs = load_runs(options.runs, options.labels)
        comparison = compare(runs, num_resamples=options.resamples, seed=options.seed)
    tasks = _tasks(options, comparison) if options.tasks else None
    try:
        if comparison is not None:
            _write_files(options, comparison, tasks)
    finally:
        sys.stdout.write(_table(options, comparison, tasks))


def _tasks(options: argparse.Namespace, comparison: RunComparison | None) -> TaskComparison:
    labels = [] if comparison is None else [figures.run.label for figures in comparison.runs]
    models = {}
    for place, each in enumerate(options.tasks):
        label, separator, folder = each.partition("=")
        if not separator:
            label, folder = labels[place], each
        models[printable(label)] = load_tasks(Path(folder), options.task_metric, options.task_filter)
    return compare_tasks(models, options.smallest_difference / 100)


def _write_files(options: argparse.Namespace, comparison: RunComparison, tasks: TaskComparison | None) -> None:
    # Each takes a second to import, and is not always asked for.
    if options.plots is not None:
        from scoremode.comparison.plots import write_plots

        write_plots(comparison, options.plots)
    if options.html is not None:
        from scoremode.comparison.report import write_report

        write_report(comparison, options.html, tasks=tasks)


def _table(options: argparse.Namespace, comparison: RunComparison | None, tasks: TaskComparison | None) -> str:
    if options.csv:
        return as_csv(comparison, () if tasks is None else tasks_as_csv(tasks))
    is_markdown = options.markdown or options.card
    parts = []
    if comparison is not None:
        parts.append((card if options.card else as_markdown if is_markdown else as_text)(comparison))
    if tasks is not None:
        parts.append((tasks_as_markdown if is_markdown else tasks_as_text)(tasks))
    return "\n".join(parts)
