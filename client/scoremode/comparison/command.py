"""What `ppl-client compare` does."""

import argparse
import sys

from scoremode.comparison.card import card
from scoremode.comparison.compare import compare
from scoremode.comparison.labels import load_runs
from scoremode.comparison.tables import as_csv, as_markdown, as_text


def run_compare(options: argparse.Namespace) -> None:
    """Compare the runs that the options name: the report and the plots first, the table on stdout last.

    Raises:
        RunError: a run cannot be read, or the runs cannot be compared.
        OSError: a file cannot be written.
    """
    runs = load_runs([options.base, *options.others], options.labels)
    comparison = compare(runs, num_resamples=options.resamples, seed=options.seed)
    try:
        # Each takes a second to import, and is not always asked for.
        if options.plots is not None:
            from scoremode.comparison.plots import write_plots

            write_plots(comparison, options.plots)
        if options.html is not None:
            from scoremode.comparison.report import write_report

            write_report(comparison, options.html)
    finally:
        as_table = card if options.card else as_markdown if options.markdown else as_csv if options.csv else as_text
        sys.stdout.write(as_table(comparison))
