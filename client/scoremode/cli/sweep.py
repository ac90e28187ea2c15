"""What `ppl-client sweep` does."""

import argparse
import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path

from scoremode._printable import printable
from scoremode.cli.progress import progress_bar
from scoremode.comparison import RunFile, compare, load_run
from scoremode.comparison.compare import check_comparable
from scoremode.comparison.plots import write_plots
from scoremode.comparison.report import write_report
from scoremode.comparison.tables import as_text
from scoremode.errors import RunError
from scoremode.sweep.plan import SweepPlan, read_plan
from scoremode.sweep.sweep import SweepResult, run_sweep

_log = logging.getLogger(__name__)


def run_plan(options: argparse.Namespace) -> bool:
    """Measure the models of the plan that the options name, and compare them, with the table on stdout last; returns
    whether every model was measured. SIGTERM stops servers as Ctrl-C does."""
    plan = read_plan(options.plan)
    result = asyncio.run(_measure(plan, options))
    try:
        _compare(plan, options.plan.parent, result)
    finally:
        for name, message in result.failures.items():
            print(f"ppl-client: {printable(f'{name} failed: {message}')}", file=sys.stderr)
    return not result.failures


async def _measure(plan: SweepPlan, options: argparse.Namespace) -> SweepResult:
    # As Ctrl-C, which a shell has background commands ignore: servers are stopped before the process ends.
    measuring = asyncio.current_task()
    assert measuring is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    open_bar = partial(progress_bar, quiet=options.quiet)
    return await run_sweep(plan, options.plan.parent, api_key=options.api_key, open_bar=open_bar)


def _compare(plan: SweepPlan, folder: Path, result: SweepResult) -> None:
    """Compare the runs that are comparable with the first; the others are failures with the reason."""
    runs: list[RunFile] = []
    for label, path in result.runs.items():
        try:
            run = load_run(path, label)
            check_comparable([*runs[:1], run])
            runs.append(run)
        except RunError as error:
            result.failures[label] = str(error)
    if not runs:
        return
    comparison = compare(runs)
    output = folder / plan.output
    if plan.compare.plots is not None:
        write_plots(comparison, output / plan.compare.plots)
    if plan.compare.html is not None:
        write_report(comparison, output / plan.compare.html)
        _log.info("the report is %s", output / plan.compare.html)
    sys.stdout.write(as_text(comparison))
