"""Whether recipes of `ppl-client layers` keep their word: predicted and measured divergences, next to other choices.

    python bench/layers.py MODEL FOLDER [--format w4a16] [--keep 2 6 12] [any vllm serve flag]

MODEL is a folder with one safetensors file, FOLDER one for checkpoints, logs and references. MODEL is recorded with its
layers, and its copy in the format (`checkpoints.FORMATS`) measured. For each N the N blocks of the recipe, N at random
and the first N by depth are left in 16 bits, and these checkpoints are served at once and compared with the same
reference. The table has what each saves in nats, and the ratio over what the recipe predicts.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import FORMATS, write_checkpoint
from servers import Server, log_of, model_server, server_process, starting
from tables import table

from scoremode import AsyncScoreClient
from scoremode.cli.layers import as_text
from scoremode.runs.corpora import load_corpus
from scoremode.runs.divergence import measure_kld
from scoremode.runs.layers import LayersMeasurement, measure_layers
from scoremode.runs.recipe import make_recipe
from scoremode.runs.recording import record_reference

NAME = "layers"
HEADER = ("kept", "blocks", "KLD", "saved", "predicted saving", "ratio")


async def record(url: str, text: Path, num_tokens: int, context_length: int) -> None:
    async with AsyncScoreClient(url, timeout=900) as client:
        cut = {"method": "disjoint", "context_length": context_length, "max_tokens": num_tokens + 1}
        await record_reference(client, load_corpus(text_file=text), NAME, layers=True, **cut)


async def costs(url: str) -> LayersMeasurement:
    async with AsyncScoreClient(url, timeout=900) as client:
        return await measure_layers(client, NAME)


async def divergence(url: str) -> float:
    async with AsyncScoreClient(url, timeout=900) as client:
        mean = (await measure_kld(client, NAME)).statistics["kld"]["mean"]
    assert mean is not None
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=FORMATS, default="w4a16")
    parser.add_argument("--keep", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests/data/wikitext.txt")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context-length", type=int, default=1024)
    options, flags = parser.parse_known_args()

    def server_of(model: Path) -> Server:
        references = ("--reference-dir", str(options.folder / "references"))
        return model_server(model, "bfloat16", "--enforce-eager", *references, *flags)

    def served(model: Path, call: Callable[..., Any], *rest: object) -> Any:
        server = server_of(model)
        with server_process(server.model, *server.flags, log=log_of(model.name, options.folder)) as process:
            started = time.perf_counter()
            result = asyncio.run(call(process.url, *rest))
            print(f"{model.name}: {call.__name__} took {time.perf_counter() - started:.1f} s", flush=True)
            return result

    served(options.model, record, options.text, options.tokens, options.context_length)
    quantized = write_checkpoint(options.model, options.folder / options.format, options.format)
    measurement = served(quantized, costs)
    print(as_text(measurement), flush=True)
    rows, rng = [], random.Random(7)
    for number in options.keep:
        recipe = make_recipe(measurement, options.model, quantized, num_blocks=number)
        by_depth = measurement.blocks[:number]
        choices = {"recipe": [each.block for each in recipe.kept], "depth": by_depth}
        choices["random"] = rng.sample(measurement.blocks, number)
        servers = {}
        for name, blocks in choices.items():
            kept = [module for block in blocks for module in block.modules]
            checkpoint = options.folder / f"{options.format}-{name}-{number}"
            servers[name] = server_of(write_checkpoint(options.model, checkpoint, options.format, kept))
        with starting(servers, options.folder) as futures:
            divergences = {name: asyncio.run(divergence(each.result().url)) for name, each in futures.items()}
        for name, kld in divergences.items():
            predicted = measurement.whole.cost - measurement.without(choices[name]).cost
            saved = measurement.whole.cost - kld
            figures = (kld, saved, predicted, saved / predicted)
            rows.append((name, str(number), *(f"{figure:.5f}" for figure in figures)))
        print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
