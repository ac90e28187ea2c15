"""Compares several runs of `ppl-client`: which is better, and whether the difference is real.

    from scoremode.comparison import compare, load_runs, summary

    comparison = compare(load_runs(["base.json", "int8.json", "int4.json"]))
    for pair in comparison.pairs:
        print(pair.first.label, pair.second.label, pair.verdict, pair.ppl_ratio.low, pair.ppl_ratio.high)
    print(*summary(comparison), sep="\\n")

The package needs the extra `report`.
"""

from scoremode.comparison.card import card
from scoremode.comparison.compare import check_comparable, compare
from scoremode.comparison.engine_log import with_logs
from scoremode.comparison.figures import Figure, PairFigures, RunComparison, RunFigures, Verdict
from scoremode.comparison.run_file import RunFile, load_run, load_runs
from scoremode.comparison.summary import summary, verdict_line
from scoremode.comparison.tables import as_csv, as_text

__all__ = [
    "Figure",
    "PairFigures",
    "RunComparison",
    "RunFigures",
    "RunFile",
    "Verdict",
    "as_csv",
    "as_text",
    "card",
    "check_comparable",
    "compare",
    "load_run",
    "load_runs",
    "summary",
    "verdict_line",
    "with_logs",
]
