"""Memory of one GPU while prompts are scored, stock `vllm serve` and `scoremode serve`, one after the other.

    python bench/memory.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs. Each server has dummy weights and
`--gpu-memory-utilization 0.95`, and gets three loads with all requests in flight at once: prefill only, then
`/v1/completions` with `echo` and `logprobs` 0, then 20. PyTorch keeps device memory that it once took, so what scoring
needs is the growth of the peak over that of prefill only; memory reserved and already taken shows as no growth.

The environment is the servers': SCOREMODE_LOGPROB_BYTES sets the budget, VLLM_USE_V2_MODEL_RUNNER=0 picks the V1 model
runner. vLLM's profile counts the sampling of `--max-num-seqs` requests (1,024 by default on such a GPU); a small number
leaves less room that nothing uses.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from servers import STOCK, Settings  # noqa: E402
from shapes import write_shape  # noqa: E402

from local_server import ServerError, running_server  # noqa: E402

SERVERS = {"stock": STOCK, "scoremode": Settings()}
LOADS: dict[str, dict[str, Any]] = {
    "prefill": {},
    "logprobs 0": {"echo": True, "logprobs": 0},
    "logprobs 20": {"echo": True, "logprobs": 20},
}
SAMPLE_MILLISECONDS = 50
LARGEST_TOKEN = 49000
"""Tokens are drawn below this, so that a tokenizer much smaller than the vocabulary knows them."""
TIMEOUT_SECONDS = 1800


@dataclass(slots=True)
class Memory:
    """Device memory in use, in MiB, as the driver tells it, and its peak since `restart`."""

    now: int = 0
    peak: int = 0
    sampled: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        """Forget the peak, and wait for a fresh sample."""
        self.peak = 0
        self.sampled.clear()
        if not self.sampled.wait(timeout=10):
            raise RuntimeError("nvidia-smi gives no samples")

    def follow(self, lines: Iterator[str]) -> None:
        """Take one sample a line."""
        for line in lines:
            self.now = int(line)
            self.peak = max(self.peak, self.now)
            self.sampled.set()


@contextmanager
def sampled_memory() -> Iterator[Memory]:
    """The first GPU's memory, sampled every 50 ms."""
    query = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = Memory()
    with subprocess.Popen((*query, f"-lms={SAMPLE_MILLISECONDS}"), stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdout is not None
        thread = threading.Thread(target=memory.follow, args=(iter(sampler.stdout.readline, ""),), daemon=True)
        thread.start()
        try:
            yield memory
        finally:
            sampler.terminate()


def write_model(shape: str, vocab_size: int, tokenizer: Path, folder: Path) -> Path:
    """A model folder of the shape, with another vocabulary."""
    model = write_shape(shape, tokenizer, folder / str(vocab_size))
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocab_size}, indent=2))
    return model


async def send_all(url: str, model: str, options: dict[str, Any], prompts: list[list[int]]) -> list[str]:
    """Send every prompt at once; the failures, told in a line each."""
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(prompt: list[int]) -> str | None:
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **options}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    text = await response.read()
                    return None if response.status == 200 else f"{response.status} {text[:300]!r}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return repr(error)

        return [failure for failure in await asyncio.gather(*map(send, prompts)) if failure]


async def is_healthy(url: str) -> bool:
    """Whether the server still answers."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health", timeout=_ten_seconds()) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _ten_seconds() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=10)


def draw_prompts(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Random tokens, which no prefix cache has."""
    rng = random.Random(seed)
    return [[rng.randrange(300, LARGEST_TOKEN) for _ in range(tokens)] for _ in range(requests)]


def measure(url: str, model: str, options: argparse.Namespace, memory: Memory) -> None:
    """Put every load on one server and print its peaks."""
    memory.restart()
    print(f"  idle: {memory.now:,} MiB", flush=True)
    prefill_peak = 0
    for number, (name, fields) in enumerate(LOADS.items()):
        memory.restart()
        start = time.perf_counter()
        failures = asyncio.run(
            send_all(url, model, fields, draw_prompts(options.requests, options.tokens, seed=number))
        )
        seconds = time.perf_counter() - start
        prefill_peak = prefill_peak or memory.peak
        growth = f" ({memory.peak - prefill_peak:+,} over prefill only)" if fields else ""
        print(
            f"  {name}: peak {memory.peak:,} MiB{growth}, {len(failures)} of {options.requests} failed, "
            f"{seconds:.1f} s, /health {'answers' if asyncio.run(is_healthy(url)) else 'does not answer'}",
            *(f"    first failure: {failure}" for failure in failures[:1]),
            sep="\n",
            flush=True,
        )


def run_server(name: str, model: Path, flags: list[str], options: argparse.Namespace, memory: Memory) -> None:
    """Start one server, measure it, stop it, and say what its log has of memory."""
    settings = SERVERS[name]
    log = options.logs / f"memory-{model.parent.name}-{name}.log"
    try:
        with running_server(
            model,
            *("--load-format", "dummy", "--gpu-memory-utilization", "0.95", "--served-model-name", "m"),
            # Stock vLLM refuses a prompt as long as the context.
            *("--max-model-len", str(options.tokens + 16), "--max-num-batched-tokens", "8192"),
            *(*flags, *settings.flags),
            log=log,
            environment=dict(settings.environment or {}),
            command=settings.command,
        ) as url:
            measure(url, "m", options, memory)
    except ServerError as error:
        print(f"  did not start: {str(error).splitlines()[0]}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if "out of memory" in line.lower()]
    print(f"  log: {len(lines)} lines with 'out of memory'", *(f"    {line[:300]}" for line in lines[:1]), sep="\n")


def main() -> None:
    """Every vocabulary on every server, one server at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shape", default="1b", help="of bench/shapes.py")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[128256, 262144])
    parser.add_argument("--tokens", type=int, default=8192, help="a request")
    parser.add_argument("--requests", type=int, default=64, help="in flight")
    options, flags = parser.parse_known_args()
    print(f"{time.strftime('%Y-%m-%d')}, {options}, servers' flags: {flags}", flush=True)
    with tempfile.TemporaryDirectory() as folder, sampled_memory() as memory:
        for vocab_size in options.vocabularies:
            model = write_model(options.shape, vocab_size, options.tokenizer, Path(folder))
            for name in SERVERS:
                print(f"vocabulary {vocab_size:,}, {name}", flush=True)
                run_server(name, model, flags, options, memory)


if __name__ == "__main__":
    main()
