"""How long a small request waits beside a large one, and after a large one whose client has left.

    python bench/waiting.py MODEL LOG [any vllm serve flag]

A server of its own on MODEL. Twenty requests of 32 tokens, one after another: on an idle server, then while 2,000
sequences of 64 tokens are scored. A loaded step is the time of that large request over its steps, each of which has as
many sequences as `--max-num-seqs` says (8 here). Then a request of the most sequences that are allowed is dropped after
two seconds, and another small one sent at once. `/health` is asked for all the while, 20 times a second.
"""

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from local_server import running_server  # noqa: E402

MAX_NUM_SEQS = 8
SMALL, SMALL_TOKENS = 20, 32
LARGE, LARGE_TOKENS = 2000, 64
MOST, MOST_TOKENS = 65_536, 5
"""`--max-request-sequences`, and what fits into `--max-scoring-tokens` with a KV cache of 1 GiB."""
DROPPED_AFTER = 2


def sequences(count: int, length: int) -> list[list[int]]:
    """Random tokens."""
    return [[random.randrange(300, 49_000) for _ in range(length)] for _ in range(count)]


def score(url: str, prompts: list[list[int]], timeout: float = 900) -> float:
    """Seconds until the answer."""
    begun = time.perf_counter()
    httpx.post(f"{url}/v1/score", json={"prompt": prompts}, timeout=timeout).raise_for_status()
    return time.perf_counter() - begun


def small_requests(url: str) -> list[float]:
    """Seconds of each."""
    return [score(url, sequences(1, SMALL_TOKENS)) for _ in range(SMALL)]


@contextmanager
def watched_health(url: str) -> Iterator[list[float]]:
    """Seconds that `/health` takes, as long as this is open."""
    done, seconds = threading.Event(), [0.0]

    def watch() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.wait(0.05):
                begun = time.perf_counter()
                client.get(f"{url}/health").raise_for_status()
                seconds.append(time.perf_counter() - begun)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seconds
        finally:
            done.set()
        watching.result()


def main() -> None:
    """Start the server, measure, print."""
    model, log, *flags = sys.argv[1:]
    limits = ("--max-num-seqs", str(MAX_NUM_SEQS), "--score-cache-bytes", "0")
    with running_server(Path(model), *limits, *flags, log=Path(log)) as url, watched_health(url) as health:
        small_requests(url)
        idle = median(small_requests(url))
        print(f"idle: {idle:.3f} s, the median of {SMALL}", flush=True)
        with ThreadPoolExecutor(1) as pool:
            large = pool.submit(score, url, sequences(LARGE, LARGE_TOKENS))
            time.sleep(1)
            waits = small_requests(url)
            print(f"the large one is {'done' if large.done() else 'not done'} after these {SMALL}", flush=True)
            seconds = large.result()
        step = seconds / (LARGE / MAX_NUM_SEQS)
        print(f"{LARGE} x {LARGE_TOKENS} tokens: {seconds:.1f} s, a step {step:.3f} s")
        bar = 5 * idle + 2 * step
        print(f"beside it: {median(waits):.3f} s, the median; longest {max(waits):.3f}; 5 idle + 2 steps are {bar:.3f}")
        try:
            score(url, sequences(MOST, MOST_TOKENS), timeout=DROPPED_AFTER)
            print("the largest request was answered before it was dropped")
        except httpx.TimeoutException:
            after = score(url, sequences(1, SMALL_TOKENS))
            print(f"after {MOST} x {MOST_TOKENS} dropped: {after:.3f} s; 2 s + 2 steps are {2 + 2 * step:.3f}")
        print(f"/health: longest {max(health):.3f} s, median {median(health):.3f}, {len(health)} times")


if __name__ == "__main__":
    main()
