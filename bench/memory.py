"""Memory of one GPU while prompts are scored, by stock `vllm serve` and `scoremode serve`, one server after another.

    python bench/memory.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any BPE tokenizer, LOGS a folder for the servers' logs. Each server has dummy weights and
`--gpu-memory-utilization 0.95`, and gets one load after another, all requests in flight at once. PyTorch keeps device
memory that it once took, so what scoring needs is the growth of the peak over that of prefill only; memory that is
reserved and already taken shows as no growth.

The environment is the servers': SCOREMODE_LOGPROB_BYTES sets the budget. vLLM's profile counts the sampling of
`--max-num-seqs` requests (1,024 by default on such a GPU); a small number leaves less room that nothing uses. A server
starts in half the time with `--enforce-eager`, which changes nothing about prompt logprobs.
"""

import argparse
import asyncio
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from loads import ECHO, PREFILL, random_tokens, send_all
from servers import Row, ServerError, benchmark_parser, has_gpu, log_of, parsed, shape_server, starting
from tables import table

SERVERS = ("stock", "scoremode")
RUNNERS = {"default": {}, "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
LOADS: dict[str, dict[str, Any]] = {
    "prefill": PREFILL,
    "logprobs 0": {**ECHO, "logprobs": 0},
    "logprobs 20": {**ECHO, "logprobs": 20},
    "prompt_logprobs 100": {**PREFILL, "prompt_logprobs": 100},
}
SAMPLE_MILLISECONDS = 100
"""A pipe holds the samples of ten minutes."""
HEADER = ("vocabulary", "runner", "server", "load", "peak, MiB", "over prefill", "answered", "s", "server afterwards")
LOG_SIGNS = re.compile("Using V2 Model Runner|out of memory|EngineDeadError|Engine core init", re.IGNORECASE)


@contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """The first GPU's memory in use, in MiB, as the driver reports it: samples, in the list when this is left. None
    without a GPU."""
    if not has_gpu():
        yield []
        return
    query = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    samples: list[int] = []
    with subprocess.Popen((*query, f"-lms={SAMPLE_MILLISECONDS}"), stdout=subprocess.PIPE, text=True) as sampler:
        try:
            yield samples
        finally:
            sampler.terminate()
            samples += map(int, sampler.communicate()[0].split())


@dataclass(frozen=True, slots=True)
class Case:
    """One server to measure."""

    vocab_size: int
    runner: str
    server: str

    def row(self, *cells: str) -> Row:
        """Make a row of the table, and print it at once."""
        row = (f"{self.vocab_size:,}", self.runner, self.server, *cells)
        print("  ", *row, flush=True)
        return row


def health(url: str) -> str:
    """The answer of `/health`: a busy server may be late to answer, a dead one refuses or answers 503."""
    try:
        status = httpx.get(f"{url}/health", timeout=10).status_code
    except httpx.TimeoutException:
        return "no answer in 10 s"
    except httpx.TransportError as error:
        return f"died: {type(error).__name__}"
    return "lives" if status == 200 else f"died: /health {status}"


def measure(url: str, case: Case, options: argparse.Namespace) -> Iterator[Row]:
    """Put every load on one server, until it dies."""
    rng = random.Random(case.vocab_size)
    prefill_peak = 0
    for load in options.loads:
        prompts = [random_tokens(rng, options.tokens) for _ in range(options.requests)]
        bodies = [{"prompt": prompt, **LOADS[load]} for prompt in prompts]
        with sampled_memory() as samples:
            rate = asyncio.run(send_all(f"{url}/v1/completions", bodies, len(bodies), options.load_seconds))
        peak, state = max(samples), health(url)
        prefill_peak = peak if load == "prefill" else prefill_peak
        yield case.row(
            *(load, f"{peak:,}", f"{peak - prefill_peak:+,}" if prefill_peak else "-"),
            *(f"{rate.requests - rate.failed} of {rate.requests}", f"{rate.seconds:.1f}", state),
        )
        if state.startswith("died"):
            return


def run_case(case: Case, folder: Path, options: argparse.Namespace, flags: list[str]) -> Iterator[Row]:
    """Start one server, measure it, stop it, and print what its log has of memory and of its end."""
    name = f"memory-{case.vocab_size}-{case.runner}-{case.server}"
    server = shape_server(
        options.shape,
        options.tokenizer,
        folder,
        # Stock vLLM refuses a prompt as long as the context.
        ("--max-model-len", str(options.tokens + 16), *flags),
        stock=case.server == "stock",
        environment=RUNNERS[case.runner],
        memory=("--gpu-memory-utilization", "0.95"),
        vocab_size=case.vocab_size,
    )
    try:
        with starting({name: server}, options.logs) as futures:
            yield from measure(futures[name].result().url, case, options)
    except ServerError as error:
        yield case.row(f"did not start: {str(error).splitlines()[0]}")
    for line in log_of(name, options.logs).read_text(errors="replace").splitlines():
        if LOG_SIGNS.search(line):
            print(f"  log: {line[:300]}", flush=True)


def main() -> None:
    """Every vocabulary on every runner with both servers, one server at a time, and the table."""
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    parser.add_argument("--shape", default="1b", help="of bench/shapes.py")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[262144, 128256])
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=["default"], help="vLLM's model runners")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["prefill", "logprobs 0", "logprobs 20"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a request")
    parser.add_argument("--requests", type=int, default=64, help="in flight")
    parser.add_argument("--load-seconds", type=float, default=600, help="until an answer; then the client hangs up")
    options, flags = parsed(parser)
    print(f"{time.strftime('%Y-%m-%d')}, {options}, servers' flags: {flags}", flush=True)
    cases = [Case(*each) for each in product(options.vocabularies, options.runners, options.servers)]
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for case in cases:
            rows += run_case(case, Path(folder), options, flags)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
