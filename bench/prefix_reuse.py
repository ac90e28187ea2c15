"""The logprob cache over HTTP on one GPU: shared prefixes beside stock vLLM, and what it costs where nothing is shared.

    python bench/prefix_reuse.py TOKENIZER LOGS [SHAPE...]      default: 8b 1b

choices   400 requests of 701 tokens: 600 shared by all, 100 shared by four, 1 of their own, 64 in flight; stock
          `vllm serve` and `scoremode serve`, this with one API server process and with two, fresh tokens every turn
unshared  5,000 requests of 256 tokens that share nothing; `scoremode serve` with its cache and with
          `--score-cache-bytes 0`, in turns; on the 8B shape, where the engine is slower, in fewer of them
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import STOCK, Settings, started  # noqa: E402

MEMORY = ("--kv-cache-memory-bytes", "3G")
"""Less than the servers of other benchmarks have: here eight share a GPU."""
SERVERS = {
    "stock": replace(STOCK, flags=MEMORY),
    "cached": Settings(MEMORY),
    "cached, two API servers": Settings((*MEMORY, "--api-server-count", "2")),
    "uncached": Settings((*MEMORY, "--score-cache-bytes", "0")),
}
CHOICES_TURNS = {"stock": 2, "cached": 5, "cached, two API servers": 5}
UNSHARED_TURNS = {"8b": 1}
MOST_UNSHARED_TURNS = 4


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
    rates: dict[str, list[float]] = {server: [] for server in CHOICES_TURNS}
    for turn in range(max(CHOICES_TURNS.values())):
        for server in (server for server, turns in CHOICES_TURNS.items() if turn < turns):
            print(f"{model}, {server}", flush=True)
            rate = run(urls[server], model, "choices", 400, seed=10 + turn)
            rates[server].append(rate.requests / rate.seconds)
    for server in ("cached", "cached, two API servers"):
        print(f"  choices, {server} / stock: {max(rates[server]) / max(rates['stock']):.1f}", flush=True)
    seconds: dict[str, list[float]] = {"cached": [], "uncached": []}
    for turn in range(UNSHARED_TURNS.get(model, MOST_UNSHARED_TURNS)):
        for server in sorted(seconds, reverse=turn % 2 == 1):
            print(f"{model}, {server}", flush=True)
            seconds[server].append(run(urls[server], model, "unshared", 5000, seed=20 + turn).seconds)
    best, average = (choose(seconds["cached"]) / choose(seconds["uncached"]) for choose in (min, mean))
    print(f"  unshared, cached / uncached seconds: best {best:.3f}, mean {average:.3f}", flush=True)


def main() -> None:
    """Start every server, measure each, print ratios."""
    tokenizer, logs, *shapes = sys.argv[1:]
    chosen = shapes or ("8b", "1b")
    with started(chosen, SERVERS, Path(tokenizer), Path(logs)) as urls:
        for shape in chosen:
            measure(shape, {server: urls[shape, server] for server in SERVERS})


if __name__ == "__main__":
    main()
