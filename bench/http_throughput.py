"""Scoring over HTTP, stock `vllm serve` beside `scoremode serve`, as a share of the same server's prefill-only rate.

    python bench/http_throughput.py TOKENIZER LOGS [SHAPE...]      default: 8b 1b

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import STOCK, Settings, started  # noqa: E402

SERVERS = {"stock": STOCK, "scoremode": Settings(), "scoremode, 4 API servers": Settings(("--api-server-count", "4"))}
COUNTS = {"tiny": 2, "1b": 384, "8b": 128}
REPEATS = 2


def measure(url: str, name: str, stock: bool, count: int) -> dict[str, float]:
    """Best tokens a second of each kind of load, after a warm-up."""
    rates: dict[str, float] = {}
    for kind in ("prefill", "echo", *(() if stock else ("score",))):
        asyncio.run(load.run(url, name, kind, min(64, count), seed=len(kind)))
        for repeat in range(1, REPEATS + 1):
            rate = asyncio.run(load.run(url, name, kind, count, seed=1000 * repeat + len(kind)))
            print(f"    {kind}: {rate}", flush=True)
            rates[kind] = max(rates.get(kind, 0.0), rate.tokens_per_second)
    return rates


def report(urls: Mapping[tuple[str, str], str]) -> None:
    """Measure each server, (shape, server) -> URL, and print its ratios."""
    for (shape, server), url in urls.items():
        print(f"{shape}, {server}", flush=True)
        rates = measure(url, shape, server == "stock", COUNTS.get(shape, 128))
        for kind in list(rates)[1:]:
            print(f"  {kind} / prefill: {rates[kind] / rates['prefill']:.3f}", flush=True)


def main() -> None:
    """Start every server and measure each."""
    tokenizer, logs, *shapes = sys.argv[1:]
    with started(shapes or ("8b", "1b"), SERVERS, Path(tokenizer), Path(logs)) as urls:
        report(urls)


if __name__ == "__main__":
    main()
