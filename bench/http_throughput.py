"""Scoring over HTTP, stock `vllm serve` beside `scoremode serve`, as a share of the same server's prefill-only rate.

    python bench/http_throughput.py TOKENIZER LOGS [SHAPE...]      default: 8b 1b

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs. All servers start first, on one
GPU, and are measured one at a time, so that both sides of a ratio come from one run.
"""

import asyncio
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from shapes import write_shape  # noqa: E402

from local_server import running_server  # noqa: E402

STOCK = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
FLAGS = ("--load-format", "dummy", "--max-model-len", "4096", "--max-num-batched-tokens", "8192")
MEMORY = ("--gpu-memory-utilization", "0.22", "--kv-cache-memory-bytes", "8G")
SERVERS: dict[str, dict[str, object]] = {
    "stock": {"command": STOCK, "environment": {"VLLM_PLUGINS": ""}},
    "scoremode": {},
    "scoremode, 4 API servers": {"flags": ("--api-server-count", "4")},
}
COUNTS = {"tiny": 2, "1b": 384, "8b": 128}
REPEATS = 2


def measure(url: str, name: str, stock: bool, count: int) -> dict[str, float]:
    """Best tokens a second of each kind of load, after a warm-up."""
    rates: dict[str, float] = {}
    for kind in ("prefill", "echo", *(() if stock else ("score",))):
        asyncio.run(load.run(url, name, kind, min(64, count), seed=hash((kind, "warm")) & 0xFFFF))
        for repeat in range(REPEATS):
            rate = asyncio.run(load.run(url, name, kind, count, seed=1000 * repeat + len(kind)))
            print(f"    {kind}: {rate}", flush=True)
            rates[kind] = max(rates.get(kind, 0.0), rate.tokens_per_second)
    return rates


def main() -> None:
    """Start every server, measure each, print ratios."""
    tokenizer, logs, *shapes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        starting = {}
        for shape in shapes or ("8b", "1b"):
            model = write_shape(shape, Path(tokenizer), Path(folder))
            for server, settings in SERVERS.items():
                settings = dict(settings)
                flags = (*FLAGS, *MEMORY, "--served-model-name", shape, *settings.pop("flags", ()))  # type: ignore[misc]
                log = Path(logs) / f"{shape}-{server.replace(', ', '-').replace(' ', '-')}.log"
                context = running_server(model, *flags, log=log, **settings)  # type: ignore[arg-type]
                starting[shape, server] = pool.submit(stack.enter_context, context)
        for (shape, server), started in starting.items():
            print(f"{shape}, {server}", flush=True)
            try:
                rates = measure(started.result(), shape, server == "stock", COUNTS.get(shape, 128))
            except Exception as error:
                print(f"    failed: {error}", flush=True)
                continue
            for kind in list(rates)[1:]:
                print(f"  {kind} / prefill: {rates[kind] / rates['prefill']:.3f}", flush=True)


if __name__ == "__main__":
    main()
