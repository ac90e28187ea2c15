"""The comparison of a sweep's runs, with its plots and its report."""

import logging
from pathlib import Path

from scoremode.comparison import RunComparison, RunFile, check_comparable, compare, load_run
from scoremode.comparison.plots import write_plots
from scoremode.comparison.report import write_report
from scoremode.errors import RunError
from scoremode.sweep.plan import SweepPlan
from scoremode.sweep.sweep import SweepResult

_log = logging.getLogger(__name__)


def compare_runs(plan: SweepPlan, folder: Path, result: SweepResult) -> RunComparison | None:
    """Compare the runs that are comparable with the first, if there are any, and write what the plan asks for.

    The other runs are added to the failures of `result`, with the reason.
    """
    runs: list[RunFile] = []
    for label, path in result.runs.items():
        try:
            run = load_run(path, label)
            check_comparable([*runs[:1], run])
            runs.append(run)
        except RunError as error:
            result.failures[label] = str(error)
    if not runs:
        return None
    comparison, output = compare(runs), folder / plan.output
    if plan.compare.plots is not None:
        write_plots(comparison, output / plan.compare.plots)
    if plan.compare.html is not None:
        write_report(comparison, output / plan.compare.html)
        _log.info("the report is %s", output / plan.compare.html)
    return comparison
