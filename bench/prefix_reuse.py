"""The logprob cache over HTTP on one GPU: shared prefixes beside stock vLLM, and what it costs where nothing is shared.

    python bench/prefix_reuse.py TOKENIZER LOGS [SHAPE...]      default: 8b 1b

choices   400 requests of 701 tokens: 600 shared by all, 100 shared by four, 1 of their own, 64 in flight; stock
          `vllm serve` and `scoremode serve`, a cold start each
unshared  5,000 requests of 256 tokens that share nothing; `scoremode serve` with its cache and with
          `--score-cache-bytes 0`, in turns
"""

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import STOCK, Settings, started  # noqa: E402

SERVERS = {"stock": STOCK, "cached": Settings(), "uncached": Settings(("--score-cache-bytes", "0"))}
TURNS = 2


def run(url: str, model: str, kind: str, count: int, seed: int) -> load.Rate:
    """One load, printed."""
    rate = asyncio.run(load.run(url, model, kind, count, seed))
    print(f"    {kind}: {rate}", flush=True)
    return rate


def measure(model: str, urls: dict[str, str]) -> None:
    """Every load of one shape."""
    for server in urls:
        print(f"{model}, {server}", flush=True)
        run(urls[server], model, "unshared", 64, seed=1)
    choices = {}
    for server in ("stock", "cached"):
        print(f"{model}, {server}", flush=True)
        # Other tokens in the second turn: nothing of the first is in a cache.
        rates = [run(urls[server], model, "choices", 400, seed=10 + turn) for turn in range(TURNS)]
        choices[server] = max(rate.requests / rate.seconds for rate in rates)
    print(f"  choices, cached / stock: {choices['cached'] / choices['stock']:.1f}", flush=True)
    seconds: dict[str, list[float]] = {"cached": [], "uncached": []}
    for turn in range(TURNS):
        for server in seconds:
            print(f"{model}, {server}", flush=True)
            seconds[server].append(run(urls[server], model, "unshared", 5000, seed=20 + turn).seconds)
    print(f"  unshared, cached / uncached seconds: {min(seconds['cached']) / min(seconds['uncached']):.3f}", flush=True)


def main() -> None:
    """Start every server, measure each, print ratios."""
    tokenizer, logs, *shapes = sys.argv[1:]
    chosen = shapes or ("8b", "1b")
    with started(chosen, SERVERS, Path(tokenizer), Path(logs)) as urls:
        for shape in chosen:
            measure(shape, {server: urls[shape, server] for server in SERVERS})


if __name__ == "__main__":
    main()
