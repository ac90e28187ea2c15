"""Has the functions that measuring commands share: for clients, corpora, lanes, outputs, and rows of tables."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from scoremode._tasks import Result
from scoremode.client import AsyncScoreClient
from scoremode.runs import (
    Calibration,
    ComparedModel,
    Corpus,
    FinishedRun,
    LayersMeasurement,
    OnProgress,
    Output,
    Overlap,
    ParityRun,
    Plan,
    comparable_with,
    lane_difference,
    load_corpus,
    patient_client,
    read_rows,
    reference_in_words,
    tokenize_texts,
    weights_in_words,
)
from scoremode.windows import WindowSettings
from scoremode.wire import CorpusInfo, Lane, Reference, ServerInfo

OnStep = TypeVar("OnStep")
Rows = list[tuple[str, str]]
"""Names and values of a table of two columns."""

Measured = tuple[NDArray[np.floating[Any]], NDArray[np.integer[Any]]]
"""NLLs or KL divergences of all n targets in nats [n], and positions [n]. A position is the target's index in its
window for `ppl-client perplexity`, and its number among the window's targets, from 1, for `ppl-client kld`."""


def measure_lanes(
    options: argparse.Namespace, measure: Callable[[argparse.Namespace, Output | None], Coroutine[Any, Any, Measured]]
) -> None:
    """Measure in the lane of the options. For `both`, measure in prefill, then in decode, and print how they differ."""
    measured = measure_each([*_each_lane(options)] if options.lane == "both" else [options], measure)
    if len(measured) > 1:
        (prefill, positions), (decode, _) = measured
        print(lane_difference(prefill, decode, positions).verdict())


def measure_each(
    runs: Sequence[argparse.Namespace],
    measure: Callable[[argparse.Namespace, Output | None], Coroutine[Any, Any, Result]],
) -> list[Result]:
    """Measure with the options of each run. If a run fails, close the journals, and add a note to the error on how to
    resume the last run that has finished windows."""
    outputs = [None if run.output is None else Output(run.output, resume=run.resume, force=run.force) for run in runs]
    written = [*filter(None, outputs)]
    try:
        measured = [asyncio.run(measure(run, output)) for run, output in zip(runs, outputs, strict=True)]
    except BaseException as error:
        hints = [output.abort() for output in written]
        error.add_note(next(filter(None, reversed(hints)), ""))
        raise
    # Keep the journals until all runs are finished: resuming needs the first run's journal too.
    for output in written:
        output.remove_journal()
    return measured


def _each_lane(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the options of the runs in prefill and in decode. The names of their outputs end in the lane."""
    for lane, decode_batch in (("prefill", None), ("decode", options.decode_batch)):
        path = options.output
        if path is not None:
            path = path.with_name(f"{path.stem}-{lane}{path.suffix}")
        yield argparse.Namespace(**{**vars(options), "lane": lane, "decode_batch": decode_batch, "output": path})


@asynccontextmanager
async def connected(
    options: argparse.Namespace, bar: AbstractContextManager[OnStep]
) -> AsyncIterator[tuple[list[AsyncScoreClient], OnStep]]:
    """Connect to each server and enter `bar`. Gives the clients, and the function that advances the bar."""
    settings = {name: getattr(options, name) for name in ("model", "api_key", "timeout", "retry_for")}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(patient_client(url, **settings)) for url in options.urls]
        yield clients, stack.enter_context(bar)


def write_and_print(
    run: FinishedRun | LayersMeasurement | ParityRun,
    overlap: Overlap | None,
    urls: Sequence[str],
    output: Output | None,
    text: str,
) -> None:
    """Write a finished run, and print `text` even if writing fails, because the run may have taken hours."""
    try:
        if output is not None:
            shared = {} if overlap is None else overlap.record()
            output.write(run.record(urls) | shared, run.arrays())
    finally:
        print(text)


def corpus_of(options: argparse.Namespace) -> Corpus:
    return load_corpus(
        options.dataset,
        text=options.text,
        text_file=options.text_file,
        config=options.dataset_config,
        split=options.split,
        column=options.text_column,
        num_samples=options.num_samples,
        preset=options.preset,
        max_windows=options.max_windows,
        messages=options.messages,
        by=options.by,
        chat_template_kwargs=options.chat_template_kwargs,
    )


async def calibration_of(options: argparse.Namespace, client: AsyncScoreClient) -> Calibration | None:
    """Read and tokenize the calibration text; None without `--calibration`. Call this before measuring: the file may be
    missing, and the client's server may fail during the run."""
    if (path := options.calibration) is None:
        return None
    texts = read_rows(path, options.calibration_column)
    return Calibration(path.name, texts, await tokenize_texts(client, texts, False), options.calibration_share)


def windows_of(options: argparse.Namespace) -> WindowSettings:
    return cast(WindowSettings, {name: getattr(options, name) for name in WindowSettings.__annotations__})


def run_settings(options: argparse.Namespace, output: Output | None, on_progress: OnProgress) -> dict[str, Any]:
    """The arguments that `evaluate` and `measure_kld` have in common."""
    return {
        "return_token_texts": output is not None,
        "concurrency": options.decode_batch or options.concurrency,
        "lane": options.lane,
        "start_journal": None if output is None else output.start_journal,
        "on_progress": on_progress,
    }


def server_rows(server: ServerInfo, lane: Lane, batch: float | None) -> Rows:
    """Make rows on the server, the date and the lane in which a model was measured."""
    rows = [
        ("revision", server.revision or "-"),
        ("server", f"scoremode {server.scoremode_version}, vLLM {server.vllm_version}"),
        ("computed on", server.devices or "-"),
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
    if lane != "prefill":
        rows.append(("lane", lane if batch is None else f"{lane}, {batch:.1f} sequences in a step on average"))
    return rows


def compared_rows(measured: ComparedModel, lane: Lane, batch: float | None) -> Rows:
    """Make rows on a model, the reference that it was compared with, and the reference's text."""
    server, reference = measured.server, measured.reference
    return [
        ("model (Q)", f"{measured.model}: {weights_in_words(server)}"),
        *server_rows(server, lane, batch),
        ("base", f"{reference.name}: {reference.model}, {reference_in_words(reference)}"),
        *window_rows(reference, reference.corpus, reference.num_scored, reference.num_tokens),
    ]


def window_rows(windows: Plan | Reference, corpus: CorpusInfo | None, num_scored: int, num_tokens: int) -> Rows:
    """Make rows on a text and its windows."""
    return [
        ("corpus", "not known" if corpus is None else corpus.in_words),
        ("figures", comparable_with(corpus, windows.context_length)),
        ("method", windows.method),
        ("context length", f"{windows.context_length:,} tokens"),
        ("stride", f"{windows.stride:,} tokens"),
        ("windows", f"{windows.num_windows:,}"),
        ("tokens", f"{num_scored:,} scored, {num_tokens:,} in the text"),
    ]
