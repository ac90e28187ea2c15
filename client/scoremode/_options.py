"""The options of `ppl-client`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scoremode import corpora
from scoremode._version import __version__
from scoremode.client import API_KEY_VARIABLE, DEFAULT_TIMEOUT, server_root
from scoremode.pool import DEFAULT_CONCURRENCY, MAX_CONCURRENCY
from scoremode.windows import METHODS

DEFAULT_URL = "http://localhost:8000"
DEFAULT_RETRY_FOR = 600.0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the process with status 2 where it is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.urls = options.urls or [DEFAULT_URL]
    if message := _contradiction(options):
        parser.error(message)
    return options


def _contradiction(options: argparse.Namespace) -> str | None:
    if options.num_samples is not None and options.dataset is None:
        return "--num-samples needs --dataset"
    if len(set(options.urls)) < len(options.urls):
        return "--url names a server twice"
    if options.resume and options.output is None:
        return "--resume needs --output: the journal is beside it"
    if not options.server_side:
        return None
    if options.resume:
        return "--resume does not work with --server-side: the server keeps the NLLs, so there is no journal"
    if len(options.urls) > 1:
        return "--server-side takes one --url: that server scores all windows"
    if options.concurrency is not None:
        return "--concurrency does not work with --server-side: the server decides"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppl-client",
        description="Perplexity of a text on a Scoremode server, from exact log-probabilities.",
        epilog="exit status: 0 if every window was scored and the output is written, 1 on failure, 2 on wrong usage, "
        "130 on Ctrl-C",
    )
    parser.add_argument("--version", action="version", version=f"ppl-client {__version__}")

    source = parser.add_argument_group("text").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset",
        metavar="NAME|PATH",
        help="wikitext, pydoc (the Python language reference, always at hand), a name on the Hugging Face hub, "
        "a local folder laid out like the hub's, or a parquet, jsonl or txt file",
    )
    source.add_argument("--text", help="the text itself")
    source.add_argument("--text-file", type=Path, metavar="FILE", help="a file that holds the text, UTF-8")

    dataset = parser.add_argument_group("dataset")
    dataset.add_argument("--dataset-config", metavar="NAME", help="wikitext: wikitext-2-raw-v1")
    dataset.add_argument("--split", default=corpora.DEFAULT_SPLIT, help="default: %(default)s")
    dataset.add_argument("--text-column", default=corpora.DEFAULT_COLUMN, metavar="NAME", help="default: %(default)s")
    dataset.add_argument("--num-samples", type=_count, metavar="N", help="the first N rows only")

    measure = parser.add_argument_group("measurement")
    measure.add_argument("--method", choices=METHODS, default="sliding", help="default: %(default)s")
    measure.add_argument(
        "--context-length", type=_count, metavar="N", help="default: 2048, or what the model takes if that is less"
    )
    measure.add_argument(
        "--stride", type=_count, metavar="N", help="default: a quarter of the context where the method takes a stride"
    )
    measure.add_argument("--max-tokens", type=_count, metavar="N", help="the first N tokens of the text only")
    measure.add_argument("--server-side", action="store_true", help="let the server cut the windows (/v1/perplexity)")
    measure.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help="windows in flight at once at each server; default: as many sequences as it runs at once, "
        f"{MAX_CONCURRENCY} at most, or {DEFAULT_CONCURRENCY} where it does not say",
    )

    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        dest="urls",
        type=_url,
        action="append",
        metavar="URL",
        help="with or without /v1; several times for several servers of the same model, over which the windows are "
        f"spread; default: {DEFAULT_URL}",
    )
    server.add_argument("--model", metavar="NAME", help="default: the served model")
    server.add_argument("--api-key", metavar="KEY", help=f"default: the environment's {API_KEY_VARIABLE}")
    server.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="without a byte from the server; default: %(default)g",
    )
    server.add_argument(
        "--retry-for",
        type=_seconds_or_zero,
        default=DEFAULT_RETRY_FOR,
        metavar="SECONDS",
        help="how long each request waits for a server that is down or busy; default: %(default)g",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE", help="write the result and all NLLs as JSON")
    output.add_argument(
        "--resume", action="store_true", help="go on from the journal that an unfinished run left beside --output"
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _seconds(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _seconds_or_zero(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _url(text: str) -> str:
    try:
        return server_root(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
