"""How long a report takes, and how large it is.

    python bench/report.py [TOKENS] [--resamples N]

Six made-up runs of TOKENS tokens with KL divergences, as files, in a folder that is deleted in the end. Timed are what
`ppl-client compare --html --plots` does: reading, comparing, the report and the files of the plots.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "bench")]

from made_up_runs import MODELS, write_runs  # noqa: E402

from scoremode.comparison import compare, load_runs  # noqa: E402
from scoremode.comparison.compare import DEFAULT_NUM_RESAMPLES  # noqa: E402
from scoremode.comparison.plots import write_plots  # noqa: E402
from scoremode.comparison.report import write_report  # noqa: E402


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the seconds that the block takes, waiting and computing."""
    start, start_cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{what:10} {time.perf_counter() - start:6.2f} s, {time.process_time() - start_cpu:6.2f} s of CPU time")


def main() -> None:
    """Make the runs, and time each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="?", type=int, default=300_000)
    parser.add_argument("--resamples", type=int, default=DEFAULT_NUM_RESAMPLES)
    options = parser.parse_args()
    print(f"{options.tokens:,} tokens, {len(MODELS)} runs, {options.resamples:,} resamples, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_runs(folder, options.tokens)
        with timed("all"):
            with timed("load"):
                runs = load_runs(paths)
            with timed("compare"):
                comparison = compare(runs, num_resamples=options.resamples)
            with timed("report"):
                write_report(comparison, folder / "report.html")
            with timed("plots"):
                write_plots(comparison, folder / "plots")
        print(f"{'size':10} {(folder / 'report.html').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
