"""Scores of items that share a query, as SGLang's own benchmark of scoring asks for them: items per second, latency.

    python bench/item_scores.py TOKENIZER LOGS [--build NAME=FOLDER...] [OPTION...] [any vllm serve flag]

SGLang's `benchmark/prefill_only/bench_score.py` sends a query of 120 tokens with ten items of 180 tokens to a
Qwen3-0.6B, and asks for the probabilities of two label tokens after query and item: ten prompts of 300 tokens per
request. Requests arrive at random times (Poisson) at a mean rate, whether or not earlier ones were answered.

This script does the same with `/v1/score`: ten prompts, and two continuations of one token, which share a pass of the
engine. The answer is ln p of both labels, from the whole vocabulary; SGLang's is their softmax. SGLang's script repeats
one token, so a prefix cache finds almost all of each prompt unless it is off. Here queries and items are random: only
the ten prompts of a request share their query.

Latency is the time from a request's arrival to the end of its answer. After the rates come requests that all arrive at
once: `cached` in the server's log says how many tokens of each the prefix cache still had. The last two loads have 64
requests in flight: scores, and prefill of such prompts. TOKENIZER is the folder of any BPE tokenizer, LOGS a folder.
Builds are those of bench/builds.py: each load is measured on every one, in an order that rotates. Without `--build` the
server runs the Scoremode that is installed.
"""

import argparse
import asyncio
import json
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from builds import Build, add_build_options, check_origin, read_builds, rotated
from loads import IN_FLIGHT, PREFILL, Body, random_tokens, send_all, words_of
from servers import Row, benchmark_parser, parsed, shape_server, starting
from tables import table

QUERY, ITEM, NUM_ITEMS = 120, 180, 10
LABELS = {False: {"continuations": [[9454], [2753]]}, True: {"continuations": [" yes", " no"]}}
"""Labels as ids, and as texts for `--texts`."""
HEADER = ("requests/s", "build", "requests", "items/s", "P50 ms", "P99 ms", "failed")


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """Requests, each with `more`, that arrive at a mean rate per second, or a number at a time."""

    name: str
    more: Body
    route: str = "/v1/score"
    rate: float = 0
    in_flight: int = 0
    """How many are sent at a time if there is no rate; 0 for all at once."""


def draw(options: argparse.Namespace, rng: random.Random, count: int, more: Body) -> list[Body]:
    """Requests of ten prompts, as token ids, or as texts of one word per token."""
    words = words_of(options.tokenizer) if options.texts else []

    def part(length: int) -> list[int] | str:
        return "".join(rng.choices(words, k=length)) if words else random_tokens(rng, length)

    queries = [part(QUERY) for _ in range(count)]
    return [{"prompt": [query + part(ITEM) for _ in range(NUM_ITEMS)], **more} for query in queries]


def measure(options: argparse.Namespace, url: str, build: str, load: ItemLoad) -> Row:
    """A row for requests that arrive at a mean rate, or that are sent with a number of them in flight."""
    rng, count = random.Random(load.name), round(load.rate * options.seconds) or options.count
    bodies = draw(options, rng, count, load.more)
    times = {"arrivals": list(accumulate(rng.expovariate(load.rate) for _ in bodies))} if load.rate else {}
    in_flight = load.in_flight or count
    done = asyncio.run(send_all(url + load.route, bodies, in_flight, **times))
    percentiles = np.percentile(done.latencies, [50, 99], method="higher")
    # Latencies start when requests arrive, so they would include the time before a request is sent.
    late = [f"{1000 * value:.0f}" for value in percentiles] if in_flight >= count else ["-", "-"]
    row = (load.name, build, str(count), f"{NUM_ITEMS * (count - done.failed) / done.seconds:,.0f}", *late)
    print(*row, done.failed, sep=" | ", flush=True)
    return (*row, str(done.failed))


def item_loads(options: argparse.Namespace) -> list[ItemLoad]:
    """List what is measured, in this order."""
    labels = LABELS[options.texts]
    rates = [ItemLoad(f"{rate:g}", labels, rate=rate) for rate in options.rates]
    in_flight = [ItemLoad(f"{IN_FLIGHT} in flight", labels, in_flight=IN_FLIGHT)]
    prefill = [ItemLoad(f"{IN_FLIGHT} in flight, prefill", PREFILL, "/v1/completions", in_flight=IN_FLIGHT)]
    return [*rates, ItemLoad("at once", labels), *in_flight, *prefill]


def main() -> None:
    """Start the servers, warm them up, and measure each load."""
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    parser.add_argument("--shape", default="0.6b", help="of bench/shapes.py")
    add_build_options(parser, required=False)
    parser.add_argument("--rates", nargs="+", type=float, default=[70, 100, 120, 160, 200, 250], help="requests/s")
    parser.add_argument("--seconds", type=float, default=20, help="for which requests arrive at each rate")
    parser.add_argument("--count", type=int, default=640, help="requests of each of the last three loads")
    parser.add_argument("--texts", action="store_true", help="send texts, which the server tokenizes")
    options, flags = parsed(parser)
    builds = read_builds(options)
    for name, build in builds.items():
        check_origin(name, build)
    servers = {
        name: shape_server(
            options.shape, options.tokenizer, options.logs, (*flags, *build.flags), environment=build.environment
        )
        for name, build in (builds or {"installed": Build((), (), {}, False)}).items()
    }
    with starting(servers, options.logs) as futures:
        urls = {name: future.result().url for name, future in futures.items()}
        for name, url in urls.items():
            measure(options, url, name, ItemLoad("warm-up", LABELS[options.texts], in_flight=IN_FLIGHT))
        rows = [
            measure(options, urls[name], name, load)
            for turn, load in enumerate(item_loads(options))
            for name in rotated(list(urls), turn)
        ]
    print(table(HEADER, rows))
    (options.logs / "item_scores.json").write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
