"""The experts of a random mixture next to those of its quantized copy, and what comparing them costs.

    python bench/routes.py LOGS [--format w4a16] [--layers 24] [--turns 12] [any vllm serve flag]

A Qwen3-MoE with random weights is recorded with routes, and its copy in the format (of checkpoints.py; attention and
routers stay in 16 bits) measured by `ppl-client kld --routes`. `rounded` is for machines without such kernels: the
copy's layers have 4 bits, written as floats. Then the copy is compared in turns without routes, with its own and with
the forced ones: the ratios are of tokens per second, over those without routes. Both servers run eagerly.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

from checkpoints import FORMATS, write_checkpoint
from paired import paired_ratio
from servers import WIKITEXT, Server, benchmark_parser, model_server, parsed, starting
from tables import table
from transformers import Qwen3MoeConfig

sys.path.append(str(Path(__file__).parents[1]))

from rounded_model import rounded_model
from scoremode import AsyncScoreClient
from scoremode.cli.kld import as_text
from scoremode.runs import load_corpus, measure_kld, record_reference
from tests import models

NAME = "routes"
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


async def measure(original: str, copy: str, text: Path, num_tokens: int, turns: int) -> None:
    async with AsyncScoreClient(original, timeout=900) as client:
        cut = {"method": "disjoint", "context_length": 512, "max_tokens": num_tokens + 1}
        await record_reference(client, load_corpus(text_file=text), NAME, routes=True, **cut)
    async with AsyncScoreClient(copy, timeout=900) as client:
        measurement = await measure_kld(client, NAME, routes=True)
        print(as_text(measurement, num_divergent=0), flush=True)
        print(json.dumps(measurement.record([])["routes"]), flush=True)
        speeds = defaultdict(list)
        for _ in range(turns):
            for routes in PASSES:
                started = time.perf_counter()
                results = [await client.kld(NAME, routes=routes) for _ in range(PASSES_PER_TURN)]
                num_scored = sum(result.num_scored for result in results)
                speeds[routes].append(num_scored / (time.perf_counter() - started))
    rows = [
        (str(routes), f"{max(speeds[routes]):,.0f}", str(paired_ratio(speeds[routes], speeds[None])))
        for routes in PASSES
    ]
    print(table(("routes", "tokens/s", "ratio"), rows), flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__, logs=Path)
    parser.add_argument("--format", choices=(*FORMATS, "rounded"), default="w4a16")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--text", type=Path, default=WIKITEXT)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--dtype", default="bfloat16")
    options, flags = parsed(parser)
    original = write_mixture(options.logs / "original", options.layers)
    if options.format == "rounded":
        copy = rounded_model(original, options.logs / "rounded")
    else:
        # vLLM loads routers unquantized.
        kept = [f"model.layers.{layer}.{name}" for layer in range(options.layers) for name in ("self_attn", "mlp.gate")]
        copy = write_checkpoint(original, options.logs / options.format, options.format, kept)

    def server_of(model: Path) -> Server:
        references = ("--reference-dir", str(options.logs / "references"))
        return model_server(model, options.dtype, "--enforce-eager", *references, *flags)

    servers = {path.name: server_of(path) for path in (original, copy)}
    with starting(servers, options.logs) as futures:
        urls = [futures[path.name].result().url for path in (original, copy)]
        asyncio.run(measure(*urls, options.text, options.tokens, options.turns))


if __name__ == "__main__":
    main()
