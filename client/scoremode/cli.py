"""`ppl-client`: the perplexity of a text on a Scoremode server, from the command line."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from scoremode import corpora
from scoremode._version import __version__
from scoremode.client import API_KEY_VARIABLE, DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT, AsyncScoreClient, server_root
from scoremode.corpora import Corpus, load_corpus
from scoremode.errors import ScoremodeError
from scoremode.evaluate import (
    DEFAULT_CONCURRENCY,
    Evaluation,
    OnProgress,
    Progress,
    evaluate,
    evaluate_on_server,
)
from scoremode.report import as_json, as_table
from scoremode.windows import METHODS, WindowError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ppl-client` and return its exit status: 0, 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.num_samples is not None and options.dataset is None:
        parser.error("--num-samples needs --dataset")
    try:
        _run(options)
    except KeyboardInterrupt:
        print("ppl-client: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ScoremodeError, WindowError, OSError) as error:
        print(f"ppl-client: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.output is not None:
        _check_writable(options.output)
    corpus = load_corpus(
        options.dataset,
        text=options.text,
        text_file=options.text_file,
        config=options.dataset_config,
        split=options.split,
        column=options.text_column,
        num_samples=options.num_samples,
    )
    evaluation = asyncio.run(_evaluate(options, corpus))
    Console().print(as_table(evaluation))
    if options.output is not None:
        record = as_json(evaluation, options.url)
        options.output.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _check_writable(path: Path) -> None:
    """Raise OSError now, not after an hour of scoring; an earlier result stays until there is a new one."""
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


async def _evaluate(options: argparse.Namespace, corpus: Corpus) -> Evaluation:
    client = AsyncScoreClient(
        options.url,
        model=options.model,
        api_key=options.api_key,
        timeout=options.timeout,
        max_retries=options.max_retries,
    )
    settings = {
        "method": options.method,
        "context_length": options.context_length,
        "stride": options.stride,
        "max_tokens": options.max_tokens,
    }
    async with client:
        with _progress_bar(quiet=options.quiet) as bar:
            on_progress = _advance(bar)
            if options.server_side:
                return await evaluate_on_server(client, corpus, **settings, on_progress=on_progress)
            return await evaluate(client, corpus, **settings, concurrency=options.concurrency, on_progress=on_progress)


def _progress_bar(*, quiet: bool) -> ProgressBar:
    return ProgressBar(
        TextColumn("windows"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} tok/s"),
        TimeRemainingColumn(),
        TextColumn("ppl {task.fields[perplexity]}"),
        console=Console(stderr=True),
        disable=quiet,
    )


def _advance(bar: ProgressBar) -> OnProgress:
    task = bar.add_task("", total=None, rate="-", perplexity="-")

    def advance(progress: Progress) -> None:
        elapsed = bar.tasks[0].elapsed
        bar.update(
            task,
            total=progress.num_windows,
            completed=progress.windows_done,
            rate=f"{progress.num_scored / elapsed:,.0f}" if elapsed else "-",
            perplexity=f"{progress.perplexity:.4f}",
        )

    return advance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppl-client",
        description="Perplexity of a text on a Scoremode server, from exact log-probabilities.",
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
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="windows in flight at once; default: %(default)s",
    )

    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", type=_url, default="http://localhost:8000", help="with or without /v1; default: %(default)s"
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
        "--max-retries", type=_count_or_zero, default=DEFAULT_MAX_RETRIES, metavar="N", help="default: %(default)s"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE", help="write the result and all NLLs as JSON")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _count_or_zero(text: str) -> int:
    return 0 if int(text) == 0 else _count(text)


def _seconds(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _url(text: str) -> str:
    try:
        return server_root(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
