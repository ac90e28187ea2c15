"""Whether recipes of `ppl-client layers` keep their word: predicted and measured divergences, next to other choices.

    python bench/layers.py MODEL LOGS [--format w4a16] [--copy FOLDER] [--keep 2 6 12] [any vllm serve flag]

MODEL is a folder with one safetensors file, LOGS one for checkpoints, logs and references. MODEL is recorded with its
layers, and its copy in the format (of checkpoints.py) measured, which is written unless `--copy` names it. For each N
the N blocks of the recipe, random ones that take as many bytes, and the first N by depth are left in 16 bits, and these
checkpoints are served at once and compared with the same reference. The table has what each saves in nats, the ratio
over what the costs predict, and the difference from that with its 95 % interval, of paired windows.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import CALIBRATED, FORMATS, write_checkpoint
from scipy.stats import t
from servers import WIKITEXT, Server, benchmark_parser, model_server, parsed, starting
from tables import table

from scoremode import AsyncScoreClient
from scoremode.cli.layers import as_text
from scoremode.runs import LayersMeasurement, load_corpus, make_recipe, measure_layers, record_reference

NAME = "layers"
CHOICES = ("recipe", "random", "depth")
HEADER = ("kept", "blocks", "KLD", "saved", "predicted saving", "ratio", "saved more than predicted")


async def record(url: str, text: Path, num_tokens: int, context_length: int) -> None:
    async with AsyncScoreClient(url, timeout=900) as client:
        cut = {"method": "disjoint", "context_length": context_length, "max_tokens": num_tokens + 1}
        await record_reference(client, load_corpus(text_file=text), NAME, layers=True, **cut)


async def costs(url: str) -> LayersMeasurement:
    async with AsyncScoreClient(url, timeout=900) as client:
        return await measure_layers(client, NAME)


async def divergences(url: str) -> np.ndarray:
    """[windows], the mean of each."""
    async with AsyncScoreClient(url, timeout=900) as client:
        result = await client.kld(NAME)
    return np.array([window.positions.kld.mean() for window in result.data])


def main() -> None:
    parser = benchmark_parser(__doc__, model=Path, logs=Path)
    parser.add_argument("--format", choices=(*FORMATS, CALIBRATED), default="w4a16")
    parser.add_argument("--copy", type=Path)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--keep", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--text", type=Path, default=WIKITEXT)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context-length", type=int, default=1024)
    options, flags = parsed(parser)

    def server_of(model: Path) -> Server:
        references = ("--reference-dir", str(options.logs / "references"))
        return model_server(model, "bfloat16", "--enforce-eager", *references, *flags)

    def served(model: Path, call: Callable[..., Any], *rest: object) -> Any:
        with starting({model.name: server_of(model)}, options.logs) as futures:
            url = futures[model.name].result().url
            started = time.perf_counter()
            result = asyncio.run(call(url, *rest))
            print(f"{model.name}: {call.__name__} took {time.perf_counter() - started:.1f} s", flush=True)
            return result

    served(options.model, record, options.text, options.tokens, options.context_length)
    quantized = options.copy or write_checkpoint(options.model, options.logs / options.format, options.format)
    measurement = served(quantized, costs)
    print(as_text(measurement), flush=True)
    rows, rng = [], random.Random(7)
    for number in options.keep:
        recipe = make_recipe(measurement, options.model, quantized, num_blocks=number)
        chosen, kinds = [each.block for each in recipe.kept], defaultdict(list)
        for block in measurement.blocks:
            kinds[block.kind].append(block)
        # As many blocks of each kind take as many bytes.
        others = [rng.sample(kind, sum(block in kind for block in chosen)) for kind in kinds.values()]
        choices = {"recipe": chosen, "random": [*chain(*others)], "depth": measurement.blocks[:number]}

        def write(name: str, choices: Mapping[str, list[Any]] = choices, number: int = number) -> Path:
            kept = [module for block in choices[name] for module in block.modules]
            checkpoint = options.logs / f"{options.format}-{name}-{number}"
            return write_checkpoint(options.model, checkpoint, options.format, kept)

        with ThreadPoolExecutor() as pool:
            checkpoints = dict(zip(options.choices, pool.map(write, options.choices), strict=True))
        servers = {name: server_of(checkpoint) for name, checkpoint in checkpoints.items()}
        with starting(servers, options.logs) as futures:
            measured = {name: asyncio.run(divergences(each.result().url)) for name, each in futures.items()}
        for name, klds in measured.items():
            without = measurement.sums_without(choices[name]) / measurement.window_sizes
            kld = klds.mean()
            saved, predicted = measurement.whole.cost - kld, measurement.whole.cost - without.mean()
            apart = without - klds
            half = t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / np.sqrt(len(apart))
            figures = (kld, saved, predicted, saved / predicted)
            row = (name, str(number), *(f"{figure:.5f}" for figure in figures))
            rows.append((*row, f"{apart.mean():+.5f} ± {half:.5f}"))
        print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
