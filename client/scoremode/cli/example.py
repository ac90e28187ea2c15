"""Implements `ppl-client example`, which compares real runs that come with the package. It needs no server."""

import argparse
import shutil
from pathlib import Path

from scoremode._texts import printable
from scoremode.cli.options import Command, Group, Option
from scoremode.errors import OutputError, extra, file_errors

RUNS = Path(__file__).with_name("example.zip")
"""The runs, which scripts/write_example.py writes."""


@extra("report")
def run(options: argparse.Namespace) -> None:
    """Unpack the runs, write the report and the card next to them, and print the verdicts."""
    folder: Path = options.output
    # Check this before the imports, which take seconds.
    if folder.exists():
        raise OutputError(f"{folder} exists already: give another folder with --output")
    from scoremode.comparison import compare, load_runs, verdict_line
    from scoremode.comparison.card import write_card
    from scoremode.comparison.report import write_report

    report, card = folder / "report.html", folder / "README.md"
    with file_errors(OutputError, f"write {folder}"):
        shutil.unpack_archive(RUNS, folder)
        comparison = compare(load_runs(sorted(folder.glob("*.json"))))
        write_report(comparison, report)
        write_card(comparison, card)
    print(f"{comparison.base.text_in_words}, {comparison.base.num_scored:,} tokens, {comparison.base.server.devices}:")
    for figures in comparison.runs[1:]:
        print(printable(verdict_line(comparison, figures)))
    print(f"report {report}, card {card}; of your own models: ppl-client quick ORIGINAL QUANTIZED")


COMMAND = Command(
    "example",
    "Three measured runs that come with the package, an original and two quantizations of it: writes them, a report "
    "and a model card, and prints the verdicts. It needs no server, no GPU and no network.",
    [
        Group(
            "",
            [
                Option(
                    "--output DIR",
                    "a folder that does not exist yet; default: %(default)s",
                    type=Path,
                    default=Path("scoremode-example"),
                )
            ],
        )
    ],
    run,
    success="all is written",
    example="ppl-client example --output /tmp/example",
)
