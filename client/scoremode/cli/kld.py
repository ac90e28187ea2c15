"""Implements `ppl-client kld`, which measures the KL divergence of a served model from a reference.

Three tables have llama.cpp's labels and formats, so that both programs' output can be compared line by line.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scoremode._texts import Column, aligned, printable, two_columns
from scoremode.cli.options import (
    CALIBRATION,
    PACE,
    REFERENCE,
    SEVERAL_SERVERS,
    Command,
    Group,
    Option,
    at_least,
    check_measurement,
    check_one_server,
    check_servers,
    output_options,
    refuse,
    value,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import (
    Measured,
    calibration_of,
    compared_rows,
    connected,
    measure_lanes,
    run_settings,
    write_and_print,
)
from scoremode.errors import MissingPackageError, extra
from scoremode.kld import NUM_MOST_DIVERGENT, times_the_floor
from scoremode.results import NUM_TOP
from scoremode.runs import (
    ClusteredMean,
    DivergentToken,
    ExpertRoutes,
    KldMeasurement,
    Output,
    Overlap,
    measure_kld,
    measure_noise_floor,
    measure_overlap,
)
from scoremode.wire import ConfidenceBucket

_QUANTILES = {
    "Maximum": "max",
    "99.9%  ": "p999",
    "99.0%  ": "p99",
    "95.0%  ": "p95",
    "90.0%  ": "p90",
    "75.0%  ": "p75",
    "Median ": "median",
    "25.0%  ": "p25",
    "10.0%  ": "p10",
    " 5.0%  ": "p5",
    " 1.0%  ": "p1",
    " 0.1%  ": "p01",
    "Minimum": "min",
}
_MOST_LAYERS = 12
"""How many layers the table of expert routes shows."""
MOST_DIVERGENT = 10
"""How many of the most divergent tokens are shown by default."""


def check(options: argparse.Namespace) -> None:
    check_servers(options)
    check_measurement(options)
    if options.floor:
        check_one_server(options, "--floor", "compares all windows")
        refuse(options, ("resume",), "floor", ", which is one request")
        refuse(options, ("concurrency", "decode_batch"), "floor", ": the server decides")
        refuse(options, ("routes",), "floor", ", which compares a model with itself")


async def _measure(options: argparse.Namespace, output: Output | None) -> Measured:
    async with connected(options, progress_bar("kld", quiet=options.quiet)) as (clients, on_progress):
        calibration = await calibration_of(options, clients[0])
        settings = run_settings(options, output, on_progress)
        if options.floor:
            one_request = {name: settings[name] for name in ("lane", "return_token_texts", "on_progress")}
            measurement = await measure_noise_floor(clients[0], options.reference, **one_request)
        else:
            num_top = 0 if output is None else options.top_logprobs
            measurement = await measure_kld(
                clients, options.reference, top_logprobs=num_top, routes=options.routes, **settings
            )
    overlap = measure_overlap(calibration, measurement)
    write_and_print(measurement, overlap, options.urls, output, as_text(measurement, overlap, options.most_divergent))
    for line in _compared(measurement):
        print(f"\n{line}")
    positions = measurement.positions
    # Compare lanes of the reference's own model by NLL: its KL divergence is only rounding, and larger outside prefill.
    nats = -positions.logprobs if measurement.reference.is_of(measurement.server) else positions.kld
    return nats, np.concatenate([np.arange(1, size + 1) for size in measurement.window_sizes])


def _compared(measurement: KldMeasurement) -> list[str]:
    """Paragraphs on the agreement of answers, if the reference has answers, and the verdict on the model, unless it is
    the reference's own. Without the extra `report`, the reason why there is no verdict."""
    if measurement.as_noise_floor and measurement.reference.answers is None:
        return []
    try:
        with extra("report"):
            from scoremode.comparison import compare, verdict_line
            from scoremode.comparison.run_file import finished_run
            from scoremode.comparison.tables import agreement_as_text

            comparison = compare([finished_run(measurement.record([]), measurement.arrays())])
    except MissingPackageError as error:
        return [f"no verdict: {error}"]
    verdicts = [printable(verdict_line(comparison, figures)) for figures in comparison.runs[1:]]
    return [*agreement_as_text(comparison), *verdicts]


def as_text(measurement: KldMeasurement, overlap: Overlap | None = None, num_divergent: int = MOST_DIVERGENT) -> str:
    """Format the models, the most divergent tokens, llama.cpp's three tables, and tables of other figures."""
    figures, clustered = measurement.statistics, "stderr_clustered"
    kld, delta_p = figures["kld"], figures["delta_p"]
    tables = [
        [
            "====== Perplexity statistics ======",
            f"Mean PPL(Q)                   : {_pair(figures, 'ppl_q')}",
            f"Mean PPL(base)                : {_pair(figures, 'ppl_base')}",
            f"Cor(ln(PPL(Q)), ln(PPL(base))): {_percent(figures['ln_ppl_correlation'], 6, 2)}%",
            f"Mean ln(PPL(Q)/PPL(base))     : {_pair(figures, 'ln_ppl_ratio')}",
            f"Mean PPL(Q)/PPL(base)         : {_pair(figures, 'ppl_ratio')}",
            f"Mean PPL(Q)-PPL(base)         : {_pair(figures, 'ppl_difference')}",
        ],
        [
            "====== KL divergence statistics ======",
            f"Mean    KLD: {_pair(kld, 'mean', 'stderr')}",
            *(f"{label} KLD: {_number(value, 10, 6)}" for label, value in _quantiles(kld)),
        ],
        [
            "====== Token probability statistics ======",
            f"Mean    Δp: {_percent_pair(delta_p, 'mean', 'stderr')}",
            *(f"{label} Δp: {_percent(value, 6, 3)}%" for label, value in _quantiles(delta_p)),
            f"RMS Δp    : {_percent_pair(delta_p, 'rms')}",
            f"Same top p: {_percent_pair(figures, 'same_top_p')}",
        ],
        [
            "====== Errors clustered by window ======",
            f"Mean    KLD              : {_pair(kld, 'mean', clustered)}",
            f"Mean ln(PPL(Q)/PPL(base)): {_pair(figures, 'ln_ppl_ratio', f'ln_ppl_ratio_{clustered}')}",
            f"Mean    Δp               : {_percent_pair(delta_p, 'mean', clustered)}",
            f"Same top p               : {_percent_pair(figures, 'same_top_p', f'same_top_p_{clustered}')}",
        ],
        _bucket_table(figures["confidence_buckets"]),
        _summary(measurement),
    ]
    if num_divergent:
        tables.insert(0, _divergent_table(measurement.most_divergent[:num_divergent]))
    if measurement.routes is not None:
        tables.append(_routes_table(measurement.routes))
    if overlap is not None:
        tables.append(_calibration_table(overlap))
    rows = compared_rows(measurement, measurement.lane, measurement.mean_batch)
    time = ("time", f"{measurement.seconds:,.1f} s, {measurement.positions_per_second:,.0f} tokens/s")
    return "\n\n".join([two_columns([*rows, time]), *map("\n".join, tables)])


def _quantiles(figures: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """The quantiles in `figures`, with llama.cpp's labels. KLD does not have the 25 % and 75 % quantiles of Δp."""
    return [(label, figures[name]) for label, name in _QUANTILES.items() if name in figures]


def _bucket_table(buckets: list[ConfidenceBucket]) -> list[str]:
    return [
        "====== By confidence of the base ======",
        "confidence      positions    share    mean KLD  same top p",
        *(
            f"[{bucket['lower']:.2f}, {bucket['upper']:.2f}{']' if bucket is buckets[-1] else ')'}"
            f"  {bucket['count']:11,}  {_percent(bucket['share'], 6, 2)}%"
            f"  {_number(bucket['mean_kld'], 10, 6)}  {_percent(bucket['same_top_p'], 9, 3)}%"
            for bucket in buckets
        ),
    ]


def _summary(measurement: KldMeasurement) -> list[str]:
    figures = measurement.statistics
    lines = [
        "====== What the mean does not say ======",
        f"Share of the top 1%: {_percent(figures['top_1_percent_share'], 6, 2)}% of the mean KLD",
        f"Mean reverse KLD   : {_number(figures['reverse_kld_mean'], 10, 6)}",
        f"Mean acceptance    : {_percent(figures['acceptance_mean'], 6, 2)}%",
        f"Noise floor        : {_noise_floor(measurement)}",
    ]
    if num_infinite := figures["num_infinite_kld"]:
        lines.append(f"Infinite KLD       : {num_infinite:,} positions, so that the mean is infinite")
    return lines


def _calibration_table(overlap: Overlap) -> list[str]:
    rest = overlap.without
    lines = ["====== Text of the calibration ======", printable(overlap.in_words)]
    if rest is not None:
        lines += [
            "Without these windows:",
            f"Mean PPL(Q)/PPL(base)         : {_pair(rest, 'ppl_ratio')}",
            f"Mean    KLD: {_pair(rest['kld'], 'mean', 'stderr')}",
        ]
    return lines


def _routes_table(routes: ExpertRoutes) -> list[str]:
    """Format how the divergence splits, the targets by the number of layers that differ, and the layers that differ
    most often. Errors are clustered by window."""
    targets, num_layers = routes.differing_layers, len(routes.layers)
    doubling = [2**power // 2 + 1 for power in range(num_layers.bit_length() + 1)]
    edges = [0, *(edge for edge in doubling if edge <= num_layers), num_layers + 1]
    counts = [sum(targets[start:end]) for start, end in pairwise(edges)]
    ordered = sorted(routes.layers, key=lambda layer: layer.same_set.mean or 0.0)[:_MOST_LAYERS]
    shown = f"layer, {_MOST_LAYERS} of {num_layers}" if len(ordered) < num_layers else "layer"
    by_number = [
        Column("layers that differ", [_range(start, end) for start, end in pairwise(edges)]),
        Column("tokens", [f"{count:,}" for count in counts]),
        Column("share", [f"{_percent(count / sum(targets), 6, 2)}%" for count in counts]),
    ]
    by_layer = [
        Column(shown, [printable(layer.name) for layer in ordered], right=False),
        *(
            Column(name, [_share(getattr(layer, name.replace(" ", "_"))) for layer in ordered])
            for name in ("same set", "same first", "overlap", "forced same set")
        ),
    ]
    lines = [
        "====== Expert routes ======",
        f"Mean    KLD       : {_nats(routes.own)}",
        f"forced (rounding) : {_nats(routes.forced)}",
        f"rerouting         : {_nats(routes.rerouting)}",
        f"KLD, same routes  : {_nats(routes.kld_same)}, {targets[0]:,} tokens",
        f"KLD, other routes : {_nats(routes.kld_other)}, {sum(targets[1:]):,} tokens",
        f"Same experts      : {_share(routes.same_experts)} of tokens and layers",
        *("", *aligned(by_number)),
        *("", *aligned(by_layer)),
    ]
    if (layer := routes.standing_out) is not None:
        share = _share(layer.forced_same_set)
        lines.append(f"The router of {printable(layer.name)} stands out: with forced experts, same set in {share}.")
    return lines


def _range(start: int, end: int) -> str:
    return f"{start}" if end == start + 1 else f"{start} to {end - 1}"


def _noise_floor(measurement: KldMeasurement) -> str:
    floor, multiple = measurement.reference.noise_floor_of(measurement.lane), measurement.kld_over_noise_floor
    reason = measurement.reference.unused_floor(measurement.lane)
    if measurement.as_noise_floor:
        return reason or "this comparison, kept with the reference"
    if floor is None:
        return f"{reason or 'not measured'} (ppl-client kld --floor, on a server of the base model)"
    in_words = f"mean KLD {floor.mean:.3g} of the base from itself, 99.0% {floor.p99:.3g}"
    return in_words if multiple is None else f"{in_words}; this is {times_the_floor(multiple)} the floor"


def _divergent_table(tokens: Sequence[DivergentToken]) -> list[str]:
    lines = ["====== Most divergent tokens ======"]
    for token in tokens:
        before = _shown((token.text_before or "")[-60:])
        if not token.text_before and token.num_context:
            before = f"{token.num_context:,} tokens that are not scored"
        reference_top = _shown(token.reference_top_token, token.reference_top_token_id)
        top = _shown(token.top_token, token.top_token_id)
        lines += [
            f"KLD {_number(token.kld, 0, 6)}, window {token.window}, after {before}",
            f"    {_shown(token.token, token.token_id)}: "
            f"base {token.reference_probability:.4f}, Q {token.probability:.4f}; "
            f"base prefers {reference_top} ({token.reference_confidence:.4f}), "
            f"Q {'too' if token.top_token_id == token.reference_top_token_id else top}",
        ]
    return lines if tokens else [*lines, "none"]


def _shown(text: str | None, token_id: int = 0) -> str:
    """A token's text in quotes and on one line, or its id."""
    return f"token {token_id}" if text is None else printable(json.dumps(text, ensure_ascii=False))


def _number(value: float | None, width: int, digits: int) -> str:
    return "-".rjust(width) if value is None or not math.isfinite(value) else f"{value:{width}.{digits}f}"


def _percent(value: float | None, width: int, digits: int) -> str:
    return _number(None if value is None else 100 * value, width, digits)


def _pair(figures: Mapping[str, Any], name: str, error: str | None = None) -> str:
    """Format the figure `name` ± its error, the figure `error` or by default `{name}_stderr`."""
    return f"{_number(figures[name], 10, 6)} ± {_number(figures[error or f'{name}_stderr'], 10, 6)}"


def _nats(mean: ClusteredMean) -> str:
    return _pair(vars(mean), "mean", "stderr")


def _share(mean: ClusteredMean) -> str:
    return _percent_pair(vars(mean), "mean", "stderr")


def _percent_pair(figures: Mapping[str, Any], name: str, error: str | None = None) -> str:
    return f"{_percent(figures[name], 6, 3)} ± {_percent(figures[error or f'{name}_stderr'], 5, 3)} %"


COMMAND = Command(
    "kld",
    "KL divergence of a served model from a recorded reference, over the whole vocabulary, in llama.cpp's tables.",
    [
        Group(
            "measurement",
            [
                Option(
                    "--reference NAME",
                    "the reference to compare with, which every server must have",
                    type=REFERENCE,
                    required=True,
                ),
                Option(
                    "--floor",
                    "compare the reference with its own model, in other batches, and keep the result as its noise "
                    "floor",
                    action="store_true",
                ),
                Option(
                    "--routes",
                    "compare the choices of experts too, and measure again with the reference's experts: is the "
                    "divergence rounding or rerouting, and in which layer?",
                    action="store_true",
                ),
                *PACE,
            ],
        ),
        CALIBRATION,
        SEVERAL_SERVERS,
        Group(
            "output",
            [
                *output_options("write the result as JSON, and the values of every token next to it as safetensors"),
                Option(
                    "--most-divergent N",
                    f"how many tokens to show, {NUM_MOST_DIVERGENT} at most; default: %(default)s",
                    type=value(int, range(NUM_MOST_DIVERGENT + 1).__contains__, f"from 0 to {NUM_MOST_DIVERGENT}"),
                    default=MOST_DIVERGENT,
                    is_rare=True,
                ),
                Option(
                    "--top-logprobs N",
                    "top tokens per position in --output; default: %(default)s",
                    type=at_least(0),
                    default=NUM_TOP,
                    is_rare=True,
                ),
            ],
        ),
    ],
    lambda options: measure_lanes(options, _measure),
    check,
    example="ppl-client kld --url http://localhost:8001 --reference base --output int8.json",
)
