"""The options of `ppl-client corpus`, apart from those of its servers."""

import argparse
from pathlib import Path


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser that has none."""
    parser.add_argument(
        "inputs",
        type=Path,
        nargs="+",
        metavar="IN",
        help="a .parquet, .jsonl, .jsonl.zst or .jsonl.gz file, or a folder with such files at any depth",
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="the documents; default: %(default)s")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="every input becomes a parquet file here, with the same rows in their order",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="go on with an earlier run: finished files stay as they are, others go on where they were",
    )
    output.add_argument(
        "--filter",
        metavar="CONDITION",
        help="keep the rows for which it is true, such as 'bits_per_byte < 1.2 and language == \"en\"'",
    )
    output.add_argument("--per-token", action="store_true", help="add token_ids and token_logprobs too")
    output.add_argument(
        "--column-prefix",
        default="",
        metavar="TEXT",
        help="put before the names of the added columns, where a file has them from another model",
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")
