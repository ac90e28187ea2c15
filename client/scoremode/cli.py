"""`ppl-client`: the perplexity of a text on Scoremode servers, from the command line."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rich.console import Console

from scoremode._options import parse_options
from scoremode._output import Output
from scoremode._progress import lines_on_stderr, progress_bar
from scoremode.client import AsyncScoreClient
from scoremode.corpora import Corpus, load_corpus
from scoremode.errors import ScoremodeError
from scoremode.evaluate import Evaluation, evaluate, evaluate_on_server
from scoremode.report import as_arrays, as_json, as_table
from scoremode.windows import WindowError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ppl-client` and return its exit status: 0, 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    options = parse_options(arguments)
    output: Output | None = None
    try:
        with lines_on_stderr():
            if options.output is not None:
                output = Output(options.output, resume=options.resume)
            _run(options, output)
    except KeyboardInterrupt:
        print(f"ppl-client: interrupted{_way_on(output)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ScoremodeError, WindowError, OSError) as error:
        print(f"ppl-client: error: {' '.join(str(error).split())}{_way_on(output)}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _way_on(output: Output | None) -> str:
    return "" if output is None else output.give_up()


def _run(options: argparse.Namespace, output: Output | None) -> None:
    corpus = load_corpus(
        options.dataset,
        text=options.text,
        text_file=options.text_file,
        config=options.dataset_config,
        split=options.split,
        column=options.text_column,
        num_samples=options.num_samples,
    )
    evaluation = asyncio.run(_evaluate(options, corpus, output))
    try:
        if output is not None:
            output.write(as_json(evaluation, options.urls), as_arrays(evaluation))
    finally:
        # A number that took hours is shown even where it cannot be written.
        Console().print(as_table(evaluation))


async def _evaluate(options: argparse.Namespace, corpus: Corpus, output: Output | None) -> Evaluation:
    settings = {
        "method": options.method,
        "context_length": options.context_length,
        "stride": options.stride,
        "max_tokens": options.max_tokens,
    }
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(options, url)) for url in options.urls]
        on_progress = stack.enter_context(progress_bar(quiet=options.quiet))
        if options.server_side:
            return await evaluate_on_server(clients[0], corpus, **settings, on_progress=on_progress)
        return await evaluate(
            clients,
            corpus,
            **settings,
            return_ranks=output is not None,
            concurrency=options.concurrency,
            start_journal=None if output is None else output.start_journal,
            on_progress=on_progress,
        )


def _client(options: argparse.Namespace, url: str) -> AsyncScoreClient:
    return AsyncScoreClient(
        url, model=options.model, api_key=options.api_key, timeout=options.timeout, retry_for=options.retry_for
    )


if __name__ == "__main__":
    sys.exit(main())
