"""Implements `ppl-client parity`, which compares the logprobs of a training job's rollouts with a server's."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace

from scoremode.cli.compare import LIMIT_EXCEEDED
from scoremode.cli.options import (
    COUNT,
    FILE,
    NAME,
    PACE,
    SEVERAL_SERVERS,
    Command,
    Group,
    Option,
    at_least,
    check_servers,
    output_options,
    require,
    value,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import connected, measure_each, write_and_print
from scoremode.runs import (
    COLUMNS,
    TEMPERATURES,
    Output,
    ParityRun,
    RolloutColumns,
    measure_parity,
    pair_of,
    parity_as_text,
)

_NAMED = ("prompt_length", "mask", "sampler", "trainer")
"""Options that name a column, which must then exist."""


def check(options: argparse.Namespace) -> None:
    check_servers(options)
    require(options, ("resume",), "output", ": the journal is next to it")


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables and the verdict, and return 3 if a limit is exceeded."""
    [measured] = measure_each([options], _measure)
    exceeded = [*_exceeded(measured, options)]
    for line in exceeded:
        print(f"ppl-client: {line}", file=sys.stderr)
    return LIMIT_EXCEEDED if exceeded else 0


async def _measure(options: argparse.Namespace, output: Output | None) -> ParityRun:
    async with connected(options, progress_bar("kld", quiet=options.quiet)) as (clients, on_progress):
        measurement = await measure_parity(
            clients,
            options.rollouts,
            _columns(options),
            num_samples=options.num_samples,
            mask_threshold=options.mask_threshold,
            concurrency=options.concurrency,
            start_journal=None if output is None else output.start_journal,
            on_progress=on_progress,
        )
    write_and_print(measurement, None, options.urls, output, parity_as_text(measurement))
    return measurement


def _columns(options: argparse.Namespace) -> RolloutColumns:
    settings = {name: getattr(options, name) for name in (*_NAMED, "token_ids", "temperature")}
    named = {name: setting for name, setting in settings.items() if setting is not None}
    required = tuple(named[name] for name in _NAMED if name in named)
    return replace(COLUMNS.get(options.columns, RolloutColumns()), **named, required=required)


def _exceeded(run: ParityRun, options: argparse.Namespace) -> Iterator[str]:
    """Lines on limits that a column exceeds, against its nearer lane, or the trainer against the sampler."""
    if options.fail_if:
        yield from (f"--fail-if differs: {finding.sentence}" for finding in run.findings if not finding.is_within)
    nearer = {" / ".join(pair_of(finding.source, finding.lane)) for finding in run.findings}
    for pair in (pair for pair in run.figures if pair in nearer | {"trainer / sampler"}):
        for option, name, limit in (
            ("--max-mean-kl", "k3", options.max_mean_kl),
            ("--max-ratio-share", "ratio_share", options.max_ratio_share),
        ):
            figure = run.figures[pair][name]
            # An infinite figure is None.
            if limit is not None and (figure is None or figure > limit):
                yield f"{option}: {math.inf if figure is None else figure:.4g} of {pair} exceeds {limit:g}"


_SEVERAL = value(lambda text: tuple(text.split(",")), all, "names of columns")

COMMAND = Command(
    "parity",
    "Compare the logprobs that a training job's sampler and trainer wrote for rollouts with those of a server of the "
    "same weights, in prefill and in the decode lane: which is what the server computes, and what explains the others.",
    [
        Group(
            "rollouts",
            [
                Option("rollouts ROLLOUTS", "a jsonl or parquet file with a row per sequence", type=FILE),
                Option(
                    "--columns LIBRARY",
                    f"columns as an RL library names them: {', '.join(COLUMNS)}",
                    choices=tuple(COLUMNS),
                ),
                Option(
                    "--token-ids COLUMN", "the tokens, or two columns with a comma: prompt, completion", type=_SEVERAL
                ),
                Option("--prompt-length COLUMN", "where the completion begins", type=NAME),
                Option("--mask COLUMN", "1 for each token to compare", type=NAME),
                Option("--sampler COLUMN", "the sampler's logprobs", type=NAME),
                Option("--trainer COLUMN", "the trainer's logprobs", type=NAME),
                Option(
                    "--temperature T",
                    "the logprobs' temperature in rows without one in a column temperature; default: 1",
                    type=value(
                        float, lambda given: TEMPERATURES[0] <= given <= TEMPERATURES[1], "a number from 0.01 to 1000"
                    ),
                ),
                Option("--num-samples N", "the first N rows only", type=COUNT),
            ],
        ),
        Group(
            "measurement",
            [
                PACE[0],
                Option(
                    "--mask-threshold RATIO",
                    "count the sequences whose ratio leaves [1 / RATIO, RATIO]; default: %(default)g",
                    type=value(float, lambda ratio: ratio > 1, "more than 1"),
                    default=1.2,
                ),
            ],
        ),
        SEVERAL_SERVERS,
        Group(
            "output",
            output_options("write the figures as JSON, and all logprobs next to it as safetensors"),
        ),
        Group(
            "limits",
            [
                Option(
                    "--fail-if differs", "exit with status 3 if a column is not within the floor", choices=["differs"]
                ),
                Option("--max-mean-kl NATS", "likewise if a column's k3 is larger", type=at_least(0, float)),
                Option("--max-ratio-share SHARE", "likewise for ratios off 1 ± 0.2", type=at_least(0, float)),
            ],
        ),
    ],
    run,
    check,
    success="every row was scored and the output is written, 3 if a limit is exceeded",
    example="ppl-client parity rollouts.jsonl --url http://localhost:8000 --output parity.json",
)
