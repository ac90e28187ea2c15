"""Implements `ppl-client sweep`, which serves and measures the models of a plan."""

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode._tasks import Result
from scoremode._texts import printable
from scoremode.cli.options import API_KEY_HELP, COUNT, FILE, QUIET, Command, Group, Option
from scoremode.cli.progress import progress_bar
from scoremode.errors import extra, require_extras
from scoremode.runs import corpora, local_path

if TYPE_CHECKING:
    from scoremode.accuracy.compare_tasks import TaskComparison
    from scoremode.sweep import SweepPlan


@extra("report")
def run(options: argparse.Namespace) -> int:
    """Sweep the models of a plan; returns 1 if a model failed."""
    from scoremode.sweep import read_plan

    plan, folder = read_plan(options.plan), options.plan.parent
    if plan.vary is None:
        return measure(plan, folder, options)
    from scoremode.cli import paths

    return paths.measure(plan, folder, options)


def measure(plan: "SweepPlan", folder: Path, options: argparse.Namespace, tasks: "TaskComparison | None" = None) -> int:
    """Measure the models of a plan, compare them, and print the tables last; returns 1 if a model failed."""
    from scoremode.comparison import as_text
    from scoremode.comparison.accuracy_tables import tasks_as_text
    from scoremode.sweep.sweep import compare_runs, run_sweep

    open_bar = partial(progress_bar, quiet=options.quiet)
    measuring = run_sweep(plan, folder, api_key=options.api_key, open_bar=open_bar, at_once=options.at_once)
    result = asyncio.run(stopped_by_sigterm(measuring))
    try:
        comparison = compare_runs(plan, folder, result, tasks)
        if comparison is not None:
            lines = [f"not measured: {name}: {message}" for name, message in result.failures.items()]
            accuracies = "" if tasks is None else f"\n{tasks_as_text(tasks)}"
            sys.stdout.write(
                as_text(comparison) + accuracies + "".join(f"\n{printable(line)}" for line in lines) + "\n"
            )
    finally:
        for name, message in result.failures.items():
            print(f"ppl-client: {printable(f'{name} failed: {message}')}", file=sys.stderr)
    return 1 if result.failures else 0


def require_extras_for(dataset: str | None) -> None:
    """Raise MissingExtraError if an extra that a sweep over this dataset needs is not installed."""
    needed = ["report"]
    if shutil.which("scoremode", path=Path(sys.executable).parent):
        needed.append("cuda")
    if dataset not in (None, corpora.PYDOC) and local_path(dataset) is None:
        needed.append("datasets")
    require_extras(*needed)


async def stopped_by_sigterm(measuring: Coroutine[Any, Any, Result]) -> Result:
    """Let SIGTERM stop `measuring` and its servers, as Ctrl-C does: background commands of a shell ignore Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measuring


AT_ONCE = Option(
    "--at-once N",
    "start up to N servers at once, if the GPU's memory suffices; models are still measured one after another. "
    "Default: as many as fit the GPU; 1 without a GPU",
    type=COUNT,
)

API_KEY = Option("--api-key KEY", f"API key of all servers; {API_KEY_HELP}")
DATASET = "wikitext"
SOURCES = [
    Option("--dataset NAME|PATH", f"as for ppl-client; default: {DATASET}"),
    Option("--text-file FILE", "a file that holds the text, UTF-8, in place of a dataset", type=FILE),
]
"""The options for a text of commands that make a plan."""

COMMAND = Command(
    "sweep",
    "Serve the models of a plan, measure each one's perplexity and its KL divergence from the first, and compare them. "
    "Earlier results are kept.",
    [
        Group(
            "",
            [
                Option("plan PLAN", "a YAML file; docs/ppl-client.md describes its fields", type=Path),
                AT_ONCE,
                API_KEY,
                QUIET,
            ],
        )
    ],
    run,
    success="every model was measured",
    if_interrupted=", servers are stopped: the same command resumes it",
    example="ppl-client sweep plan.yaml",
)
