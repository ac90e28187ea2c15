"""Scores of items that share a query, as SGLang's own benchmark of scoring asks for them: items per second, latency.

    python bench/item_scores.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

SGLang's `benchmark/prefill_only/bench_score.py` sends a query of 120 tokens with ten items of 180 tokens to a
Qwen3-0.6B, and asks for the probabilities of two label tokens after query and item: ten prompts of 300 tokens per
request. Requests arrive at random times (Poisson) at a mean rate, whether or not earlier ones were answered.

This script does the same with `/v1/score`: ten prompts, and two continuations of one token, which share a pass of the
engine. The answer is ln p of both labels, from the whole vocabulary; SGLang's is their softmax. SGLang's script repeats
one token, so a prefix cache finds almost all of each prompt unless it is off. Here queries and items are random: only
the ten prompts of a request share their query.

Latency is the time from a request's arrival to the end of its answer. After the rates come requests that all arrive at
once: `cached` in the server's log says how many tokens of each the prefix cache still had. The last two rows are rates
with 64 requests in flight: scores, and prefill of such prompts. TOKENIZER is the folder of any BPE tokenizer, LOGS a
folder.
"""

import argparse
import asyncio
import json
import random
from itertools import accumulate
from pathlib import Path

import numpy as np
from loads import IN_FLIGHT, PREFILL, Body, random_tokens, send_all, words_of
from servers import Row, benchmark_parser, parsed, shape_server, starting
from tables import table

QUERY, ITEM, NUM_ITEMS = 120, 180, 10
LABELS = {False: {"continuations": [[9454], [2753]]}, True: {"continuations": [" yes", " no"]}}
"""Labels as ids, and as texts for `--texts`."""
HEADER = ("requests/s", "requests", "items/s", "P50 ms", "P99 ms", "failed")


def draw(options: argparse.Namespace, rng: random.Random, count: int, more: Body) -> list[Body]:
    """Requests of ten prompts, as token ids, or as texts of one word per token."""
    words = words_of(options.tokenizer) if options.texts else []

    def part(length: int) -> list[int] | str:
        return "".join(rng.choices(words, k=length)) if words else random_tokens(rng, length)

    queries = [part(QUERY) for _ in range(count)]
    return [{"prompt": [query + part(ITEM) for _ in range(NUM_ITEMS)], **more} for query in queries]


def measure(
    options: argparse.Namespace, url: str, name: str, more: Body, rate: float = 0, in_flight: int = IN_FLIGHT
) -> Row:
    """A row for requests that arrive at a mean rate, or that are sent with a number of them in flight."""
    rng, count = random.Random(name), round(rate * options.seconds) or options.count
    bodies = draw(options, rng, count, more)
    times = {"arrivals": list(accumulate(rng.expovariate(rate) for _ in bodies))} if rate else {}
    done = asyncio.run(send_all(url, bodies, count if rate else in_flight, **times))
    percentiles = np.percentile(done.latencies, [50, 99], method="higher")
    # Latencies start when requests arrive, so they would include the time before a request is sent.
    late = [f"{1000 * value:.0f}" for value in percentiles] if rate or in_flight >= count else ["-", "-"]
    row = (name, str(count), f"{NUM_ITEMS * (count - done.failed) / done.seconds:,.0f}", *late)
    print(*row, done.failed, sep=" | ", flush=True)
    return (*row, str(done.failed))


def main() -> None:
    """Start the server, warm it up, and measure each rate."""
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    parser.add_argument("--shape", default="0.6b", help="of bench/shapes.py")
    parser.add_argument("--rates", nargs="+", type=float, default=[70, 100, 120, 160, 200, 250], help="requests/s")
    parser.add_argument("--seconds", type=float, default=20, help="for which requests arrive at each rate")
    parser.add_argument("--count", type=int, default=640, help="requests of the last three rows")
    parser.add_argument("--texts", action="store_true", help="send texts, which the server tokenizes")
    options, flags = parsed(parser)
    labels = LABELS[options.texts]
    server = shape_server(options.shape, options.tokenizer, options.logs, flags)
    with starting({"items": server}, options.logs) as futures:
        url = futures["items"].result().url
        score, prefill = f"{url}/v1/score", f"{url}/v1/completions"
        measure(options, score, "warm-up", labels)
        rows = [measure(options, score, f"{rate:g}", labels, rate) for rate in options.rates]
        rows.append(measure(options, score, "at once", labels, in_flight=options.count))
        rows.append(measure(options, score, "64 in flight", labels))
        rows.append(measure(options, prefill, "64 in flight, prefill", PREFILL))
    print(table(HEADER, rows))
    (options.logs / "item_scores.json").write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
