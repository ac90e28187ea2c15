"""Implements `ppl-client layers`, which measures how much each block of a served model's decoder layers adds to its KL
divergence from a reference, and chooses blocks to keep in 16 bits."""

import argparse
import json
from itertools import accumulate
from pathlib import Path

from scoremode._texts import printable, two_columns
from scoremode.cli.options import (
    COUNT,
    MORE_THAN_0,
    PACE,
    REFERENCE,
    SEVERAL_SERVERS,
    Command,
    Group,
    Option,
    UsageError,
    check_servers,
    output_options,
    require,
)
from scoremode.cli.progress import progress_bar
from scoremode.cli.running import compared_rows, connected, measure_each, write_and_print
from scoremode.runs import (
    LayersMeasurement,
    Output,
    Recipe,
    few_windows,
    make_recipe,
    measure_layers,
    shares,
    tensor_bytes,
)


def check(options: argparse.Namespace) -> None:
    check_servers(options)
    require(options, ("resume",), "output", ": the journal is next to it")
    needs_weights = options.keep is not None or options.keep_gib is not None
    for name in ("base_weights", "weights"):
        option, path = f"--{name.replace('_', '-')}", getattr(options, name)
        if needs_weights and path is None:
            raise UsageError(f"--keep and --keep-gib need {option} DIR, whose files say how large blocks are")
        if path is not None and not path.is_dir():
            raise UsageError(f"{option}: {path} is not a folder")


def run(options: argparse.Namespace) -> None:
    """Measure, write the output and print the tables."""
    # A recipe needs both checkpoints: check that they can be read, before hours of work.
    if options.keep is not None or options.keep_gib is not None:
        tensor_bytes(options.base_weights)
        tensor_bytes(options.weights)
    [measurement] = measure_each([options], _measure)
    if options.keep is not None or options.keep_gib is not None:
        extra_bytes = None if options.keep_gib is None else options.keep_gib * 2**30
        print(
            recipe_as_text(
                make_recipe(
                    measurement, options.base_weights, options.weights, num_blocks=options.keep, extra_bytes=extra_bytes
                ),
                measurement,
            )
        )


async def _measure(options: argparse.Namespace, output: Output | None) -> LayersMeasurement:
    async with connected(options, progress_bar("kld", quiet=options.quiet)) as (clients, on_progress):
        measurement = await measure_layers(
            clients,
            options.reference,
            concurrency=options.concurrency,
            start_journal=None if output is None else output.start_journal,
            on_progress=on_progress,
        )
    write_and_print(measurement, None, options.urls, output, as_text(measurement))
    return measurement


def as_text(measurement: LayersMeasurement) -> str:
    """Format the models, the model's parts by falling cost with their shares and running totals, and sums by kind."""
    whole = measurement.whole
    heading = [
        *compared_rows(measurement, "prefill", None),
        ("time", f"{measurement.seconds:,.1f} s"),
        ("whole model", f"{whole.in_words} nats per token"),
    ]
    parts = sorted(measurement.parts, key=lambda part: -part.cost)
    width = max(len(part.name) for part in parts)
    lines = [
        "====== Cost of each part ======",
        f"{'part':{width}}  {'kind':16}  {'cost in nats':>22}  {'share':>7}  {'so far':>7}",
    ]
    own_shares = shares(parts)
    for part, share, so_far in zip(parts, own_shares, accumulate(own_shares), strict=True):
        mark = "" if part.is_above_floor else "  not above the floor"
        lines.append(
            f"{printable(part.name):{width}}  {part.kind:16}  {part.in_words:>22}  {share:7.1%}  {so_far:7.1%}{mark}"
        )
    lines.append("shares are of the sum of all costs above 0")
    paragraphs = [two_columns(heading), "\n".join(lines), "\n".join(_kinds(measurement))]
    return "\n\n".join([*paragraphs, *few_windows(measurement.reference)])


def _kinds(measurement: LayersMeasurement) -> list[str]:
    lines = ["====== By kind ======", f"{'kind':16}  {'parts':>5}  {'cost in nats':>12}  {'share':>7}"]
    parts, own_shares = measurement.parts, shares(measurement.parts)
    for kind in dict.fromkeys(part.kind for part in parts):
        costs = [part.cost for part in parts if part.kind == kind]
        share = sum(share for part, share in zip(parts, own_shares, strict=True) if part.kind == kind)
        lines.append(f"{kind:16}  {len(costs):5}  {sum(costs):12.6f}  {share:7.1%}")
    return lines


def recipe_as_text(recipe: Recipe, measurement: LayersMeasurement) -> str:
    """Format the kept blocks, the expected divergence, and settings for llm-compressor and vLLM."""
    lines = [
        "",
        f"====== Keep {len(recipe.kept)} blocks in 16 bits: {recipe.extra_bytes / 2**30:.4f} GiB more ======",
        *(
            f"{printable(choice.block.name)}  {choice.block.cost:.6f} nats, {choice.extra_bytes:,} bytes"
            for choice in recipe.kept
        ),
        f"Expected KLD: {recipe.predicted.in_words} instead of {measurement.whole.in_words}",
        "",
        "llm-compressor, recipe.yaml:" if recipe.modifier else "llm-compressor, for an unknown scheme:",
        recipe.modifier or f"ignore: {json.dumps(recipe.ignore)}",
        "",
        "vLLM, quantizing online:",
        f"  --quantization-config '{recipe.quantization_config}'",
    ]
    return "\n".join(lines)


COMMAND = Command(
    "layers",
    "Measure how much of a served model's KL divergence from a reference each block of its decoder layers costs, and "
    "choose blocks to keep in 16 bits. The reference must be recorded with --layers.",
    [
        Group(
            "measurement",
            [
                Option(
                    "--reference NAME",
                    "the reference, recorded with --layers; every server must have it",
                    type=REFERENCE,
                    required=True,
                ),
                PACE[0],
            ],
        ),
        Group(
            "recipe",
            [
                Option("--keep N", "choose the N blocks to keep, by nats per byte", type=COUNT),
                Option("--keep-gib GIB", "choose blocks to keep that add at most this size", type=MORE_THAN_0),
                Option("--base-weights DIR", "the original's checkpoint", type=Path),
                Option("--weights DIR", "the served model's checkpoint", type=Path),
            ],
        ),
        SEVERAL_SERVERS,
        Group(
            "output",
            output_options("write the costs as JSON, and the divergence of every window next to it as safetensors"),
        ),
    ],
    run,
    check,
    success="every boundary was measured and the output is written",
    example="ppl-client layers --url http://localhost:8001 --reference base-layers --output layers.json",
)
