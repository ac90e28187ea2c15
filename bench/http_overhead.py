"""The share of wall time that the API server adds to the engine's own, ours beside stock; on a CPU, in two minutes.

    python bench/http_overhead.py [REQUESTS]

Scoring requests of 1,023 tokens, one at a time, to a model so small that its engine is quick. The engine's own time is
vLLM's: from a request's first scheduling to its result, as its `/metrics` have it.
"""

import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "scripts")]

from local_server import running_server  # noqa: E402
from tests import models  # noqa: E402

STOCK = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
LENGTH = 1023
ECHO = ("/v1/completions", {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0})
SCORE = ("/v1/score", {"encoding_format": "base64"})
PREFILL_SECONDS = re.compile(r"^vllm:request_prefill_time_seconds_sum\{.*\} ([0-9.e+-]+)$", re.MULTILINE)


def engine_seconds(client: httpx.Client) -> float:
    """Seconds that the engine has spent on prompts so far."""
    return sum(map(float, PREFILL_SECONDS.findall(client.get("/metrics").text)))


def measure(client: httpx.Client, path: str, options: dict[str, Any], count: int) -> tuple[float, float]:
    """(wall seconds, engine seconds) a request, after a warm-up."""
    rng = random.Random(0)
    bodies = [{"prompt": [rng.randrange(2, 1024) for _ in range(LENGTH)], **options} for _ in range(count + 5)]
    for body in bodies[:5]:
        client.post(path, json=body).raise_for_status()
    before, start = engine_seconds(client), time.perf_counter()
    for body in bodies[5:]:
        client.post(path, json=body).raise_for_status()
    wall = time.perf_counter() - start
    return wall / count, (engine_seconds(client) - before) / count


def main() -> None:
    """Measure each server in turn and print a table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"{'server':10} {'route':16} {'wall, ms':>9} {'engine, ms':>11} {'API server':>11}")
    with tempfile.TemporaryDirectory() as folder:
        model = models.random_llama(Path(folder) / "model")
        for name, loads, options in (
            ("stock", [ECHO], {"command": STOCK, "environment": {"VLLM_PLUGINS": ""}}),
            ("scoremode", [ECHO, SCORE], {}),
        ):
            flags = ("--max-model-len", "2048", "--max-num-seqs", "4")
            log = Path(folder) / f"{name}.log"
            with (
                running_server(model, *flags, log=log, **options) as url,  # type: ignore[arg-type]
                httpx.Client(base_url=url, timeout=300) as client,
            ):
                for path, body in loads:
                    wall, engine = measure(client, path, body, count)
                    share = 1 - engine / wall
                    print(f"{name:10} {path:16} {wall * 1e3:9.1f} {engine * 1e3:11.1f} {share:11.0%}", flush=True)


if __name__ == "__main__":
    main()
