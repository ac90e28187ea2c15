"""The experts of a random mixture next to those of its quantized copy, and what comparing them costs.

    python bench/routes.py LOGS [--format w4a16] [--layers 24] [--shape moe30b-w4a16] [--turns 12] [any vllm serve flag]

A Qwen3-MoE with random weights is recorded with routes, and its copy in the format (of checkpoints.py; attention and
routers stay in 16 bits) measured by `ppl-client kld --routes`. `rounded` is for machines without such kernels: the
copy's layers have 4 bits, written as floats. Then the copy is compared in turns without routes, with its own and with
the forced ones: the ratios are of tokens per second, over those without routes. All servers run eagerly.

Layers of that model are so small that the costs of starting kernels count. `--shape` also measures the speed on dummy
weights of a mixture that people use, compared with its own recording.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from checkpoints import FORMATS, write_checkpoint
from paired import paired_ratio
from servers import WIKITEXT, benchmark_parser, model_server, parsed, shape_server, starting
from shapes import NAMES
from tables import table
from transformers import Qwen3MoeConfig

sys.path.append(str(Path(__file__).parents[1]))

from rounded_model import rounded_model
from scoremode import AsyncScoreClient
from scoremode.cli.kld import as_text
from scoremode.runs import load_corpus, measure_kld, record_reference
from tests import models

MEMORY = ("--gpu-memory-utilization", "0.8", "--kv-cache-memory-bytes", "8G")
PASSES = (None, "own", "forced")
PASSES_PER_TURN = 5
"""A pass takes half a second on an H200, which alone is too short to compare."""


def write_mixture(path: Path, layers: int) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=256, norm_topk_prob=True,
        max_position_embeddings=4096, initializer_range=0.05, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return models.random_model_of(config, path)


async def record(url: str, name: str, text: Path, num_tokens: int) -> None:
    async with AsyncScoreClient(url, timeout=900) as client:
        cut = {"method": "disjoint", "context_length": 512, "max_tokens": num_tokens + 1}
        await record_reference(client, load_corpus(text_file=text), name, routes=True, **cut)


async def print_figures(url: str, name: str) -> None:
    async with AsyncScoreClient(url, timeout=900) as client:
        measurement = await measure_kld(client, name, routes=True)
    print(as_text(measurement, num_divergent=0), flush=True)
    print(json.dumps(measurement.record([])["routes"]), flush=True)


async def print_speeds(url: str, name: str, turns: int) -> None:
    speeds = defaultdict(list)
    async with AsyncScoreClient(url, timeout=900) as client:
        for _ in range(turns):
            for routes in PASSES:
                started = time.perf_counter()
                results = [await client.kld(name, routes=routes) for _ in range(PASSES_PER_TURN)]
                num_scored = sum(result.num_scored for result in results)
                speeds[routes].append(num_scored / (time.perf_counter() - started))
    rows = [
        (str(routes), f"{max(speeds[routes]):,.0f}", str(paired_ratio(speeds[routes], speeds[None])))
        for routes in PASSES
    ]
    print(table(("routes", "tokens/s", "ratio"), rows), flush=True)


def measure_copy(original: Path, options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Print figures and speeds of a copy of `original`."""
    if options.format == "rounded":
        copy = rounded_model(original, options.logs / "rounded")
    else:
        # vLLM loads routers unquantized.
        kept = [f"model.layers.{layer}.{name}" for layer in range(options.layers) for name in ("self_attn", "mlp.gate")]
        copy = write_checkpoint(original, options.logs / options.format, options.format, kept)
    servers = {path.name: model_server(path, options.dtype, *flags) for path in (original, copy)}
    with starting(servers, options.logs) as futures:
        recording, measured = (futures[path.name].result().url for path in (original, copy))
        asyncio.run(record(recording, original.name, options.text, options.tokens))
        asyncio.run(print_figures(measured, original.name))
        asyncio.run(print_speeds(measured, original.name, options.turns))


def measure_shape(tokenizer: Path, options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Print speeds of a shape, compared with what it recorded itself."""
    server = shape_server(options.shape, tokenizer, options.logs, ("--dtype", options.dtype, *flags), memory=MEMORY)
    with starting({options.shape: server}, options.logs) as futures:
        url = futures[options.shape].result().url
        asyncio.run(record(url, options.shape, options.text, options.tokens))
        asyncio.run(print_speeds(url, options.shape, options.turns))


def main() -> None:
    parser = benchmark_parser(__doc__, logs=Path)
    parser.add_argument("--format", choices=(*FORMATS, "rounded"), default="w4a16")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shape", choices=NAMES)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--text", type=Path, default=WIKITEXT)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--dtype", default="bfloat16")
    options, flags = parsed(parser)
    original = write_mixture(options.logs / "original", options.layers)
    eager = ("--enforce-eager", "--reference-dir", str(options.logs / "references"), *flags)
    measure_copy(original, options, eager)
    if options.shape:
        measure_shape(original, options, eager)


if __name__ == "__main__":
    main()
