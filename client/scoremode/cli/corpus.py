"""Implements `ppl-client corpus`, which measures the perplexity of every document in files."""

import argparse
import asyncio
from pathlib import Path

from scoremode._texts import two_columns
from scoremode.cli.options import COUNT, QUIET, SEVERAL_SERVERS, Command, Group, Option, check_servers, value
from scoremode.cli.progress import corpus_bar
from scoremode.cli.running import connected
from scoremode.corpus import CorpusProgress, score_corpus
from scoremode.corpus.documents import FIGURE_COLUMNS, REQUESTS_IN_FLIGHT

_FIGURES = f"some of {', '.join(FIGURE_COLUMNS)}, with commas between them"


async def run(options: argparse.Namespace) -> None:
    async with connected(options, corpus_bar(quiet=options.quiet)) as (clients, on_progress):
        done = await score_corpus(
            clients,
            options.inputs,
            options.output,
            text_column=options.text_column,
            column_prefix=options.column_prefix,
            per_token=options.per_token,
            figures=options.figures,
            context_length=options.context_length,
            concurrency=options.concurrency,
            resume=options.resume,
            on_progress=on_progress,
        )
    print(as_text(done))


def as_text(done: CorpusProgress) -> str:
    """Format the figures of a finished run in two columns."""
    files, documents = f"{done.files_done:,}", f"{done.num_documents:,}"
    if done.num_finished_before:
        files += f", {done.num_finished_before:,} of them finished before"
    if done.num_resumed:
        documents += f", {done.num_resumed:,} of them scored before"
    rows = [("files", files), ("documents", documents)]
    if done.num_unscored:
        reason = "" if done.first_error is None else f", the first because {done.first_error}"
        rows.append(("without figures", f"{done.num_unscored:,}{reason}"))
    rows.append(("tokens", f"{done.num_tokens:,}"))
    if done.perplexity is not None:
        rows.append(("perplexity", f"{done.perplexity:.4f}"))
    rate = (done.num_tokens - done.num_tokens_resumed) / done.seconds if done.seconds else 0
    return two_columns([*rows, ("time", f"{done.seconds:.1f} s, {rate:,.0f} tokens/s")])


COMMAND = Command(
    "corpus",
    "Perplexity of every document of parquet and jsonl files: the same rows, with num_tokens, nll, perplexity and "
    "bits_per_byte.",
    [
        Group(
            "",
            [
                Option(
                    "inputs IN",
                    "a .parquet, .jsonl, .jsonl.zst or .jsonl.gz file, or a folder with such files at any depth",
                    type=Path,
                    nargs="+",
                ),
                Option("--text-column NAME", "the documents; default: %(default)s", default="text"),
            ],
        ),
        Group(
            "output",
            [
                Option(
                    "--output DIR",
                    "every input becomes a parquet file here, with the same rows in their order",
                    type=Path,
                    required=True,
                ),
                Option(
                    "--resume",
                    "resume an earlier run: finished files stay as they are, others are continued where they ended",
                    action="store_true",
                ),
                Option(
                    "--figures NAMES",
                    f"add these columns too: {_FIGURES}; min_k++ becomes min_k_plus_plus",
                    type=value(
                        lambda text: text.split(","), lambda names: set(names) <= FIGURE_COLUMNS.keys(), _FIGURES
                    ),
                    default=(),
                ),
                Option("--per-token", "add token_ids and token_logprobs too", action="store_true"),
                Option(
                    "--column-prefix TEXT",
                    "put before the names of the added columns, where a file has them from another model",
                    default="",
                ),
                QUIET,
            ],
        ),
        Group(
            "scoring",
            [
                Option(
                    "--context-length N",
                    "cut longer documents into windows of N tokens; default: what the model takes",
                    type=COUNT,
                ),
                Option(
                    "--concurrency N",
                    "requests in flight at once at each server, each of some 8,000 tokens; default: "
                    f"{REQUESTS_IN_FLIGHT}",
                    type=COUNT,
                ),
            ],
        ),
        SEVERAL_SERVERS,
    ],
    lambda options: asyncio.run(run(options)),
    check_servers,
    success="every file is written",
    if_interrupted=": the same command with --resume resumes it",
    example="ppl-client corpus --url http://localhost:8000 documents.parquet --output scored",
)
