"""What a teacher is asked for, stock `vllm serve` beside `scoremode serve`, on one GPU.

    python bench/teachers.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs. `top50` is a share of the same
server's prefill, `trl` a multiple of stock's rate, each the best of two after a warm-up. With `--large`, one server has
0.95 of the GPU instead, and gets 64 requests of 8,192 tokens with `prompt_logprobs: 100`, all at once.
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import MEMORY, STOCK, Settings, started  # noqa: E402
from shapes import SHAPES  # noqa: E402

TOP = ("--max-logprobs", "128")
COUNTS = {"8b": 96, "1b": 256, "tiny": 2}
TRL_COUNT = 64
STOCK_COUNT = 6
"""Some ten seconds for stock vLLM."""
LARGE_REQUESTS, LARGE_TOKENS = 64, 8192
TURNS = 2


def best(url: str, shape: str, kind: str, count: int) -> load.Rate:
    """The best of some turns."""
    asyncio.run(load.run(url, shape, kind, min(count, 8), seed=len(kind)))
    rates = []
    for turn in range(TURNS):
        rates.append(asyncio.run(load.run(url, shape, kind, count, seed=100 * turn + len(kind))))
        print(f"  {shape} {kind}: {rates[-1]}", flush=True)
    if failed := sum(rate.failed for rate in rates):
        raise RuntimeError(f"{failed} requests of {kind} failed")
    return max(rates, key=lambda rate: rate.tokens_per_second)


def measure_rates(options: argparse.Namespace, flags: list[str]) -> None:
    """Ours on each shape; stock on the smallest, for `trl` alone."""
    ours = Settings((*TOP, *flags))
    stock = Settings((*TOP, *flags), command=STOCK.command, environment=STOCK.environment)
    smallest = options.shapes[-1]
    with (
        started(options.shapes, {"scoremode": ours}, options.tokenizer, options.logs) as urls,
        started([smallest], {"stock": stock}, options.tokenizer, options.logs) as stock_urls,
    ):
        for shape in options.shapes:
            url, count = urls[shape, "scoremode"], COUNTS[shape]
            prefill = best(url, shape, "prefill", count).tokens_per_second
            top = best(url, shape, "top50", count).tokens_per_second
            print(f"{shape}: top50 {top:,.0f} tokens/s, / prefill {top / prefill:.3f}", flush=True)
        count = min(TRL_COUNT, COUNTS[smallest])
        trl = best(urls[smallest, "scoremode"], smallest, "trl", count).tokens_per_second
        of_stock = best(stock_urls[smallest, "stock"], smallest, "trl", min(STOCK_COUNT, count)).tokens_per_second
        print(
            f"{smallest}: trl {trl:,.0f} tokens/s, stock {of_stock:,.0f}, times stock {trl / of_stock:.1f}", flush=True
        )


def measure_large(options: argparse.Namespace, flags: list[str]) -> None:
    """Many long requests with many logprobs at once, on a server that has nearly all of the GPU."""
    smallest = options.shapes[-1]
    memory = ("--gpu-memory-utilization", "0.95") if not options.small else MEMORY
    settings = Settings((*TOP, *flags, "--max-model-len", str(LARGE_TOKENS + 1)))
    rng = random.Random(5)
    length = LARGE_TOKENS if not options.small else 64
    bodies = [
        {"model": smallest, "prompt": [rng.randrange(300, 49000) for _ in range(length)], **load.KINDS["trl"][1]}
        for _ in range(LARGE_REQUESTS if not options.small else 4)
    ]
    with started([smallest], {"scoremode": settings}, options.tokenizer, options.logs, memory) as urls:
        url = urls[smallest, "scoremode"]
        rate = asyncio.run(load.send_all(f"{url}/v1/completions", bodies))
        print(f"{smallest}, large: {rate}", flush=True)
        after = asyncio.run(load.run(url, smallest, "trl", 1, seed=1))
        print(f"{smallest}, one more after it: {after}", flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "1b"], help="the smallest last")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--small", action="store_true", help="try --large out without a GPU")
    options, flags = parser.parse_known_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    (measure_large if options.large else measure_rates)(options, flags)


if __name__ == "__main__":
    main()
