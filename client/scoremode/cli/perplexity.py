"""Implements `ppl-client perplexity`, the default command, which measures the perplexity of a text."""

import argparse

import numpy as np

from scoremode._texts import two_columns
from scoremode.cli.options import (
    CALIBRATION,
    DATASET,
    PACE,
    SEVERAL_SERVERS,
    TEXT,
    WINDOWS,
    Command,
    Group,
    check_measurement,
    check_servers,
    check_text,
    output_options,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import (
    Measured,
    calibration_of,
    connected,
    corpus_of,
    measure_lanes,
    run_settings,
    server_rows,
    window_rows,
    windows_of,
    write_and_print,
)
from scoremode.runs import Evaluation, Output, Overlap, evaluate, measure_overlap, weights_in_words


def check(options: argparse.Namespace) -> None:
    check_servers(options)
    check_text(options)
    check_measurement(options)


async def _measure(options: argparse.Namespace, output: Output | None) -> Measured:
    corpus = corpus_of(options)
    async with connected(options, progress_bar("ppl", quiet=options.quiet)) as (clients, on_progress):
        calibration = await calibration_of(options, clients[0])
        evaluation = await evaluate(
            clients,
            corpus,
            **windows_of(options),
            return_ranks=output is not None,
            **run_settings(options, output, on_progress),
        )
    overlap = measure_overlap(calibration, evaluation)
    write_and_print(evaluation, overlap, options.urls, output, as_text(evaluation, overlap))
    positions = [np.arange(window.first_scored, window.num_tokens) for window in evaluation.plan.windows]
    return np.concatenate([window.nlls for window in evaluation.windows]), np.concatenate(positions)


def as_text(evaluation: Evaluation, overlap: Overlap | None = None) -> str:
    """Format an evaluation in two columns, and if `overlap` is given, the perplexity without calibration text."""
    plan, result, text = evaluation.plan, evaluation.result, evaluation.text_metrics
    rows = [
        ("model", plan.model),
        ("weights", weights_in_words(plan.server)),
        *server_rows(plan.server, plan.lane, evaluation.mean_batch),
        *window_rows(plan, plan.corpus.info, result.num_scored, len(plan.tokens)),
        ("time", f"{evaluation.seconds:,.1f} s, {evaluation.tokens_per_second:,.0f} tokens/s"),
        ("NLL", f"{_with_error(result.nll_mean, result.nll_stderr, 6)} nats/token"),
        ("bits per byte", "-" if text.bits_per_byte is None else f"{text.bits_per_byte:.4f}"),
        ("word perplexity", "-" if text.word_perplexity is None else f"{text.word_perplexity:,.4f}"),
        ("perplexity", _with_error(result.perplexity, result.perplexity_stderr, 4)),
    ]
    if overlap is not None:
        rest = overlap.without
        without = "-" if rest is None else _with_error(rest.perplexity, rest.perplexity_stderr, 4)
        rows += [("calibrated on", overlap.in_words), ("without these", without)]
    return two_columns(rows)


def _with_error(value: float, stderr: float | None, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return text if stderr is None else f"{text} ± {stderr:,.{digits}f}"


COMMAND = Command(
    "perplexity",
    "Perplexity of a text on a Scoremode server, from exact log-probabilities.",
    [
        TEXT,
        DATASET,
        Group("measurement", WINDOWS + PACE),
        CALIBRATION,
        SEVERAL_SERVERS,
        Group(
            "output",
            output_options(
                "write the result and all NLLs as JSON, and the values of every token next to it as safetensors"
            ),
        ),
    ],
    lambda options: measure_lanes(options, _measure),
    check,
    example="ppl-client --url http://localhost:8000 --dataset pydoc --num-samples 20 --output base.json",
)
