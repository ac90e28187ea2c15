"""The options of `ppl-client compare`."""

import argparse
from pathlib import Path

MIN_RESAMPLES = 100


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser that has none."""
    parser.add_argument("base", type=Path, metavar="BASE.json", help="the run that others are shown beside")
    parser.add_argument("others", type=Path, nargs="+", metavar="RUN.json", help="a run on the same text and windows")
    parser.add_argument(
        "--labels",
        type=lambda text: text.split(","),
        metavar="A,B,...",
        help="what the runs are called, in their order; default: the models' names, or the files' where they are equal",
    )
    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print tables as GitHub shows them")
    form.add_argument(
        "--card",
        action="store_true",
        help="print the table that is published with a quantized model, where its figures are from, and the YAML of a "
        "Hugging Face model card",
    )
    form.add_argument("--csv", action="store_true", help="print a line for every figure, in full precision")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a report, one file that loads nothing")
    output.add_argument("--plots", type=Path, metavar="DIR", help="write the plots as SVG and PNG")
    statistics = parser.add_argument_group("intervals")
    statistics.add_argument(
        "--resamples", type=_num_resamples, default=4000, metavar="N", help="of the text; default: %(default)s"
    )
    statistics.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the resamples; default: %(default)s")


def compare_contradiction(options: argparse.Namespace) -> str | None:
    """What is wrong with options that are each right."""
    paths = [options.base, *options.others]
    if len({path.resolve() for path in paths}) < len(paths):
        return "a run is named twice"
    if options.labels is None:
        return None
    if len(options.labels) != len(paths):
        return f"--labels has {len(options.labels)} names for {len(paths)} runs"
    if not all(options.labels) or len(set(options.labels)) < len(paths):
        return "--labels needs another name for every run"
    return None


def _num_resamples(text: str) -> int:
    if (value := int(text)) < MIN_RESAMPLES:
        raise argparse.ArgumentTypeError(f"must be at least {MIN_RESAMPLES}, got {text}")
    return value


def _seed(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value
