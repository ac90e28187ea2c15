"""`ppl-client`: perplexity of a text or of documents, KL divergence from a reference, and finished runs compared."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from scoremode._printable import printable
from scoremode.cli.options import parse_options
from scoremode.cli.progress import corpus_bar, export_bar, lines_on_stderr, progress_bar
from scoremode.client import AsyncScoreClient
from scoremode.corpus import score_corpus
from scoremode.corpus.settings import figures_as_text
from scoremode.errors import ScoremodeError, extra
from scoremode.runs import kld_report, report
from scoremode.runs.calibration import Calibration, measure_overlap
from scoremode.runs.corpora import Corpus, load_corpus, read_rows
from scoremode.runs.divergence import measure_kld, measure_noise_floor
from scoremode.runs.evaluate import evaluate
from scoremode.runs.export import export_llama_cpp
from scoremode.runs.lanes import lane_difference
from scoremode.runs.output import Output
from scoremode.runs.plan import tokenize_texts
from scoremode.runs.recording import record_reference
from scoremode.runs.run import OnProgress
from scoremode.windows import WindowError, WindowSettings
from scoremode.wire.retries import FIRST_CONTACT_SECONDS, PATIENT_RETRY_FOR

OnStep = TypeVar("OnStep")

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

_Measured = tuple[NDArray[np.floating[Any]], NDArray[np.integer[Any]]]
"""Nats of each target, and its position in its window; of a KL divergence, its position among the window's targets."""

_HOW_TO_RESUME = {
    "record": ": the same command resumes it",
    "export": ": the same command resumes it",
    "corpus": ": the same command with --resume resumes it",
    "sweep": ", servers are stopped: the same command resumes it",
}
"""What commands that keep their finished work without `Output` say when they are interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ppl-client` and return its exit status: 0, 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    options = parse_options(arguments)
    outputs: list[Output] = []
    try:
        with lines_on_stderr():
            match options.command:
                case "perplexity" | "kld":
                    _measure(options, outputs)
                case "compare":
                    with extra("report"):
                        from scoremode.cli.compare import run_compare

                        run_compare(options)
                case "sweep":
                    with extra("report"):
                        from scoremode.cli.sweep import run_plan
                    return 0 if run_plan(options) else EXIT_FAILURE
                case command:
                    asyncio.run({"record": _record, "export": _export, "corpus": _score_corpus}[command](options))
    except (KeyboardInterrupt, asyncio.CancelledError):  # The second is SIGTERM's, in a sweep.
        print(f"ppl-client: interrupted{_HOW_TO_RESUME.get(options.command) or _resume_hint(outputs)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ScoremodeError, WindowError, OSError) as error:
        # YAML's complaint about a plan has a mark below the line that it is about.
        lines = str(error).split("\n") if options.command == "sweep" else [" ".join(str(error).split())]
        message = "\n".join(map(printable, lines))
        print(f"ppl-client: error: {message}{_resume_hint(outputs)}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _resume_hint(outputs: Sequence[Output]) -> str:
    hints = [output.abort() for output in outputs]
    return printable(next(filter(None, reversed(hints)), ""))


def _measure(options: argparse.Namespace, outputs: list[Output]) -> None:
    """Measure in one lane, or in both one after the other and print what they differ in. `outputs` gets their files."""
    measure = _measure_perplexity if options.command == "perplexity" else _measure_kld
    lanes = [*_each_lane(options)] if options.lane == "both" else [options]
    if options.output is not None:
        outputs += [Output(lane.output, resume=options.resume, force=options.force) for lane in lanes]
    files: list[Output | None] = [*outputs] or [None] * len(lanes)
    measured = [asyncio.run(measure(lane, file)) for lane, file in zip(lanes, files, strict=True)]
    # Not before all lanes are finished: a command that resumes them has the windows of the first from its journal.
    for output in outputs:
        output.remove_journal()
    if len(measured) > 1:
        (prefill, positions), (decode, _) = measured
        print(lane_difference(prefill, decode, positions).verdict())


def _each_lane(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The options of a run in each lane, whose output is named after the lane."""
    for lane in ("prefill", "decode"):
        of_lane = {"lane": lane, "decode_batch": options.decode_batch if lane == "decode" else None}
        if options.output is not None:
            of_lane["output"] = options.output.with_name(f"{options.output.stem}-{lane}{options.output.suffix}")
        yield argparse.Namespace(**{**vars(options), **of_lane})


async def _measure_perplexity(options: argparse.Namespace, output: Output | None) -> _Measured:
    corpus = _corpus(options)
    async with _connected(options, progress_bar("ppl", quiet=options.quiet)) as (clients, on_progress):
        calibration = await _calibration(clients[0], options)
        settings = _run_settings(options, output, on_progress)
        evaluation = await evaluate(
            clients, corpus, **_window_settings(options), return_ranks=output is not None, **settings
        )
    sizes = [window.num_scored for window in evaluation.windows]
    overlap = calibration and measure_overlap(calibration, evaluation.plan.target_ids(), sizes, evaluation.result_of)
    _keep_and_show(report, evaluation, overlap, options, output)
    positions = [np.arange(window.first_scored, window.num_tokens) for window in evaluation.plan.windows]
    return np.concatenate([found.nlls for found in evaluation.windows]), np.concatenate(positions)


async def _record(options: argparse.Namespace) -> None:
    corpus = _corpus(options)
    async with _connected(options, progress_bar("ppl", quiet=options.quiet)) as (clients, on_progress):
        recording = await record_reference(
            clients[0], corpus, options.reference, **_window_settings(options), on_progress=on_progress
        )
    print(kld_report.recording_as_text(recording))


async def _export(options: argparse.Namespace) -> None:
    async with _connected(options, export_bar(quiet=options.quiet)) as (clients, on_bytes):
        size = await export_llama_cpp(
            clients[0], options.reference, options.llama_cpp, force=options.force, on_bytes=on_bytes
        )
    print(printable(f"{options.llama_cpp}: {size:,} bytes"))


async def _measure_kld(options: argparse.Namespace, output: Output | None) -> _Measured:
    async with _connected(options, progress_bar("kld", quiet=options.quiet)) as (clients, on_progress):
        calibration = await _calibration(clients[0], options)
        settings = _run_settings(options, output, on_progress)
        if options.floor:
            of_one_request = {name: settings[name] for name in ("lane", "return_token_texts", "on_progress")}
            measurement = await measure_noise_floor(clients[0], options.reference, **of_one_request)
        else:
            num_top = 0 if output is None else options.top_logprobs
            measurement = await measure_kld(clients, options.reference, top_logprobs=num_top, **settings)
    positions, sizes = measurement.positions, measurement.window_sizes
    overlap = calibration and measure_overlap(calibration, positions.token_ids, sizes, measurement.statistics_of)
    _keep_and_show(kld_report, measurement, overlap, options, output)
    # By rounding a model diverges from itself more in the other lane.
    nats = -positions.logprobs if measurement.reference.is_of(measurement.server) else positions.kld
    return nats, np.concatenate([np.arange(1, size + 1) for size in sizes])


def _run_settings(options: argparse.Namespace, output: Output | None, on_progress: OnProgress) -> dict[str, Any]:
    """What `evaluate` and `measure_kld` have in common."""
    return {
        "return_token_texts": output is not None,
        "concurrency": options.decode_batch or options.concurrency,
        "lane": options.lane,
        "start_journal": None if output is None else output.start_journal,
        "on_progress": on_progress,
    }


def _keep_and_show(writer: Any, run: Any, overlap: Any, options: argparse.Namespace, output: Output | None) -> None:
    """Write a finished run, and print it. `writer` is the module for its kind."""
    try:
        if output is not None:
            output.write(writer.as_json(run, options.urls, overlap), writer.as_arrays(run))
    finally:
        # A number that took hours is shown even where it cannot be written.
        print(writer.as_text(run, overlap))


async def _score_corpus(options: argparse.Namespace) -> None:
    names = ("text_column", "column_prefix", "per_token", "context_length", "concurrency", "resume")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    async with _connected(options, corpus_bar(quiet=options.quiet)) as (clients, on_progress):
        done = await score_corpus(clients, options.inputs, options.output, **settings, on_progress=on_progress)
    print(figures_as_text(done))


def _corpus(options: argparse.Namespace) -> Corpus:
    names = ("text", "text_file", "split", "num_samples", "preset", "messages", "by", "chat_template_kwargs")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    return load_corpus(options.dataset, config=options.dataset_config, column=options.text_column, **settings)


async def _calibration(client: AsyncScoreClient, options: argparse.Namespace) -> Calibration | None:
    """Needed before anything is measured: it may be missing, and `client` be lost during the run."""
    if (path := options.calibration) is None:
        return None
    texts = read_rows(path, options.calibration_column)
    return Calibration(path.name, texts, await tokenize_texts(client, texts, False), options.calibration_share)


def _window_settings(options: argparse.Namespace) -> WindowSettings:
    return cast(WindowSettings, {name: getattr(options, name) for name in WindowSettings.__annotations__})


@asynccontextmanager
async def _connected(
    options: argparse.Namespace, bar: AbstractContextManager[OnStep]
) -> AsyncIterator[tuple[list[AsyncScoreClient], OnStep]]:
    """A client for each server, and the progress bar to be advanced."""
    settings = {"model": options.model, "api_key": options.api_key, "timeout": options.timeout}
    retry_for = PATIENT_RETRY_FOR if options.retry_for is None else options.retry_for
    async with AsyncExitStack() as stack:
        clients = []
        for url in options.urls:
            client = await stack.enter_async_context(AsyncScoreClient(url, **settings, retry_for=retry_for))
            if options.retry_for is None:
                client.retries.first_contact = FIRST_CONTACT_SECONDS
            clients.append(client)
        yield clients, stack.enter_context(bar)
