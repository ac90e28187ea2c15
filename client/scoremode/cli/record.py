"""`ppl-client record`: a served model's distributions, recorded as a reference."""

import argparse
import asyncio
from datetime import UTC, datetime

from scoremode._texts import two_columns
from scoremode.cli.options import (
    DATASET,
    ONE_SERVER,
    QUIET,
    TEXT,
    WINDOWS,
    Command,
    Group,
    Option,
    check_one_server,
    check_text,
    refuse,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import connected, corpus_of, window_rows, windows_of
from scoremode.runs.recording import Recording, record_reference
from scoremode.runs.report import reference_in_words

LAYERS_CONTEXT = 1024
LAYERS_TOKENS = 4 * LAYERS_CONTEXT + 1
"""Four windows: method `disjoint` leaves out a window that ends with the text."""


def check(options: argparse.Namespace) -> None:
    check_one_server(options, "record", "has all windows")
    refuse(options, ("preset", "method", "stride", "messages"), "layers", ": its windows are disjoint")
    if options.layers:
        options.method = "disjoint"
        options.context_length = options.context_length or LAYERS_CONTEXT
        options.max_tokens = options.max_tokens or LAYERS_TOKENS
    check_text(options)


async def run(options: argparse.Namespace) -> None:
    corpus = corpus_of(options)
    async with connected(options, progress_bar("ppl", quiet=options.quiet)) as ([client], on_progress):
        recording = await record_reference(
            client,
            corpus,
            options.reference,
            layers=options.layers,
            on_progress=on_progress,
            **windows_of(options),
        )
    print(as_text(recording))


def as_text(recording: Recording) -> str:
    """A recording in two columns."""
    reference = recording.reference
    resumed = f", {recording.num_resumed:,} of them before" if recording.num_resumed else ""
    figures = (
        "-" if value is None else f"{value:.4f}" for value in (reference.perplexity, reference.perplexity_stderr)
    )
    return two_columns(
        [
            ("reference", reference.name),
            ("model", reference.model),
            ("weights", reference_in_words(reference)),
            ("server", f"scoremode {reference.scoremode_version}, vLLM {reference.vllm_version}"),
            ("date", f"{datetime.fromtimestamp(reference.created, UTC):%Y-%m-%d %H:%M} UTC"),
            *window_rows(reference, reference.corpus, reference.num_scored, reference.num_tokens),
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
        TEXT,
        DATASET,
        Group(
            "recording",
            [
                Option("--reference NAME", "name to record under: letters, digits, '.', '_' and '-'", required=True),
                Option(
                    "--layers",
                    "record the residual stream at every boundary of the decoder layers too, for `ppl-client layers`, "
                    f"by default of {LAYERS_TOKENS - 1:,} tokens in disjoint windows of {LAYERS_CONTEXT:,}; the "
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
