"""Implements `ppl-client record`, which records a served model's distributions as a reference."""

import argparse
import asyncio
from datetime import UTC, datetime
from pathlib import Path

from scoremode._texts import two_columns
from scoremode.cli.options import (
    COUNT,
    DATASET,
    ONE_SERVER,
    QUIET,
    REFERENCE,
    TEXT,
    WINDOWS,
    Command,
    Group,
    Option,
    UsageError,
    at_least,
    check_one_server,
    check_text,
    refuse,
    require,
    value,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import connected, corpus_of, window_rows, windows_of
from scoremode.runs import (
    DEFAULT_COLUMN,
    MAX_CONCURRENCY,
    PROMPT_COLUMNS,
    Recording,
    load_prompts,
    record_answers,
    record_reference,
    reference_in_words,
)
from scoremode.wire import AnswerSettings

LAYERS_CONTEXT = 1024
LAYERS_TOKENS = 4 * LAYERS_CONTEXT + 1
"""Default number of tokens with `--layers`: four windows, and one token more, because method `disjoint` cuts a window
only if a token follows it."""


def check_windows(options: argparse.Namespace) -> None:
    """Check the options for text and windows, and fill in their defaults, which `--layers` changes."""
    refuse(options, ("preset", "method", "stride", "messages"), "layers", ": its windows are disjoint")
    if options.layers:
        options.method = "disjoint"
        options.context_length = options.context_length or LAYERS_CONTEXT
        options.max_tokens = options.max_tokens or LAYERS_TOKENS
    check_text(options)


def check(options: argparse.Namespace) -> None:
    check_one_server(options, "record", "has all windows")
    require(options, ("max_new_tokens", "temperature", "seed", "decode_batch"), "prompts")
    if options.prompts is None:
        check_windows(options)
        return
    names = "text_column dataset_config layers preset method context_length stride max_tokens max_windows"
    options.text_column = None if options.text_column == DEFAULT_COLUMN else options.text_column
    refuse(options, names.split(), "prompts", ": the targets are the answers' tokens")
    if options.max_new_tokens is None:
        raise UsageError("--prompts needs --max-new-tokens N")
    if bool(options.temperature) != (options.seed is not None):
        raise UsageError("--temperature 1 and --seed S are given together, or neither for greedy answers")


async def run(options: argparse.Namespace) -> None:
    record = _record_text if options.prompts is None else _record_answers
    print(as_text(await record(options)))


async def _record_text(options: argparse.Namespace) -> Recording:
    corpus = corpus_of(options)
    async with connected(options, progress_bar("ppl", quiet=options.quiet)) as ([client], on_progress):
        return await record_reference(
            client,
            corpus,
            options.reference,
            layers=options.layers,
            routes=options.routes,
            on_progress=on_progress,
            **windows_of(options),
        )


async def _record_answers(options: argparse.Namespace) -> Recording:
    names = ("messages", "by", "num_samples", "chat_template_kwargs")
    prompts = load_prompts(options.prompts, **{name: getattr(options, name) for name in names})
    settings = AnswerSettings(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature or 0, seed=options.seed
    )
    async with connected(options, progress_bar("tokens", quiet=options.quiet)) as ([client], on_answer):
        return await record_answers(
            client,
            prompts,
            options.reference,
            settings,
            routes=options.routes,
            concurrency=options.decode_batch,
            on_progress=on_answer,
        )


def as_text(recording: Recording) -> str:
    """Format a recording in two columns."""
    reference = recording.reference
    resumed = f", {recording.num_resumed:,} of them before" if recording.num_resumed else ""
    answers = [] if reference.answers is None else [("answers", reference.answers.in_words)]
    figures = (
        "-" if value is None else f"{value:.4f}" for value in (reference.perplexity, reference.perplexity_stderr)
    )
    return two_columns(
        [
            ("reference", reference.name),
            ("model", reference.model),
            ("weights", reference_in_words(reference)),
            ("recorded by", f"scoremode {reference.scoremode_version}, {reference.engine}"),
            ("date", f"{datetime.fromtimestamp(reference.created, UTC):%Y-%m-%d %H:%M} UTC"),
            *window_rows(reference, reference.corpus, reference.num_scored, reference.num_tokens),
            *answers,
            ("recorded", f"{reference.num_recorded:,} windows{resumed}"),
            ("on disk", f"{reference.disk_bytes / 2**30:,.3f} GiB"),
            ("time", f"{recording.seconds:,.1f} s"),
            ("perplexity", " ± ".join(figures)),
        ]
    )


COMMAND = Command(
    "record",
    "Record a served model's distributions over a text on its server, for `ppl-client kld` to compare other models "
    "with. The same command again resumes an interrupted recording.",
    [
        Group(
            TEXT.title,
            [
                *TEXT.options,
                Option(
                    "--prompts FILE",
                    "record the served model's greedy answers to the prompts in a jsonl or parquet file, in its first "
                    f"column of {', '.join(PROMPT_COLUMNS)}, or in that of --messages",
                    type=Path,
                ),
            ],
            is_exclusive=True,
        ),
        DATASET,
        Group(
            "answers",
            [
                Option("--max-new-tokens N", "limit on the tokens of an answer; needed with --prompts", type=COUNT),
                Option(
                    "--decode-batch N",
                    "prompts in flight at once; default: as many sequences as the server runs at once, at most "
                    f"{MAX_CONCURRENCY}",
                    type=COUNT,
                    is_rare=True,
                ),
                Option(
                    "--temperature T",
                    "1 samples the answers, with --seed; default: 0, greedy",
                    type=value(float, (0, 1).__contains__, "0 or 1"),
                    is_rare=True,
                ),
                Option(
                    "--seed S",
                    "seed of the first sampled answer; each next answer's is one more",
                    type=at_least(0),
                    is_rare=True,
                ),
            ],
        ),
        Group(
            "recording",
            [
                Option(
                    "--reference NAME",
                    "name to record under: letters, digits, '.', '_' and '-'",
                    type=REFERENCE,
                    required=True,
                ),
                Option(
                    "--layers",
                    "record the residual stream at every boundary of the decoder layers too, for `ppl-client layers`, "
                    f"by default of {LAYERS_TOKENS - 1:,} tokens in disjoint windows of {LAYERS_CONTEXT:,}; the "
                    "server must run with --enforce-eager",
                    action="store_true",
                ),
                Option(
                    "--routes",
                    "record the experts that mixture-of-experts layers choose too, for `ppl-client kld --routes`; the "
                    "server must run with --enforce-eager",
                    action="store_true",
                ),
                *WINDOWS,
            ],
        ),
        ONE_SERVER,
        Group("output", [QUIET]),
    ],
    lambda options: asyncio.run(run(options)),
    check,
    if_interrupted=": the same command resumes it",
    example="ppl-client record --url http://localhost:8000 --dataset pydoc --num-samples 20 --reference base",
)
