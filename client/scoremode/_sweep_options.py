"""The options of `ppl-client sweep`."""

import argparse
from pathlib import Path

from scoremode.client import API_KEY_VARIABLE


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser that has none."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a YAML file; docs/compare.md says what it has")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"of all servers; default: the environment's {API_KEY_VARIABLE}"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
