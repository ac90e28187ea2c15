"""Memory of one GPU while prompts are scored, stock `vllm serve` and `scoremode serve`, one after the other.

    python bench/memory.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs. Each server has dummy weights and
`--gpu-memory-utilization 0.95`, and gets three loads with all requests in flight at once: prefill only, then
`/v1/completions` with `echo` and `logprobs` 0, then 20. PyTorch keeps device memory that it once took, so what scoring
needs is the growth of the peak over that of prefill only; memory reserved and already taken shows as no growth.

The environment is the servers': SCOREMODE_LOGPROB_BYTES sets the budget. vLLM's profile counts the sampling of
`--max-num-seqs` requests (1,024 by default on such a GPU); a small number leaves less room that nothing uses. A server
starts in half the time with `--enforce-eager`, which changes nothing about prompt logprobs; both go without CUDA graphs
then, and give their memory to the KV cache.

Both vocabularies on both model runners are eight servers. In one call of nine minutes, the likeliest to die first:

    python bench/memory.py TOKENIZER LOGS --runners v1 v2 --time-limit 530 --load-seconds 30 --enforce-eager

What time does not allow is said, not left out. With two GPUs, `--gpu 1 --vocabularies 128256` beside
`--gpu 0 --vocabularies 262144` takes half as long.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from device_memory import Memory, sampled_memory  # noqa: E402
from servers import STOCK, Settings  # noqa: E402
from shapes import write_shape  # noqa: E402

from local_server import ServerError, running_server  # noqa: E402

SERVERS = {"stock": STOCK, "scoremode": Settings()}
RUNNERS = {"default": {}, "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
LOADS: dict[str, dict[str, Any]] = {
    "prefill": {},
    "logprobs 0": {"echo": True, "logprobs": 0},
    "logprobs 20": {"echo": True, "logprobs": 20},
}
LARGEST_TOKEN = 49000
"""Tokens are drawn below this, so that a tokenizer much smaller than the vocabulary knows them."""
STOP_SECONDS = 10
LEAST_SECONDS = 45
"""A server is not started with less time left."""
HEAD = "vocabulary | runner | server | load | peak, MiB | over prefill | answered | failed | s | server afterwards"


@dataclass(frozen=True, slots=True)
class Case:
    """One server to measure."""

    vocab_size: int
    runner: str
    server: str

    def __str__(self) -> str:
        return f"{self.vocab_size:,} | {self.runner} | {self.server}"

    @property
    def log_name(self) -> str:
        """Name of its log file."""
        return f"memory-{self.vocab_size}-{self.runner}-{self.server}.log"


@dataclass(slots=True)
class Run:
    """What all servers share: the options, the GPU's memory, the time left, and the table as it grows."""

    options: argparse.Namespace
    flags: list[str]
    memory: Memory
    end: float
    rows: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Until the time limit."""
        return self.end - time.monotonic()

    def add(self, case: Case, *cells: str) -> None:
        """Add a row to the table, and show it at once."""
        self.rows.append(" | ".join((str(case), *cells)))
        print(f"  {self.rows[-1]}", flush=True)


@dataclass(frozen=True, slots=True)
class Answers:
    """The result of a load: requests answered, failures in a line each, and requests without an answer in time."""

    answered: int
    failures: list[str]
    unanswered: int


def write_model(shape: str, vocab_size: int, tokenizer: Path, folder: Path) -> Path:
    """A model folder of the shape, with another vocabulary."""
    model = write_shape(shape, tokenizer, folder / str(vocab_size))
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocab_size}, indent=2))
    return model


async def send_all(url: str, options: dict[str, Any], prompts: list[list[int]], seconds: float) -> Answers:
    """Send every prompt at once, and hang up on what is not answered after so many seconds."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(prompt: list[int]) -> str | None:
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, **options}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    text = await response.read()
                    return None if response.status == 200 else f"{response.status} {text[:300]!r}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return repr(error)

        done, pending = await asyncio.wait([asyncio.create_task(send(prompt)) for prompt in prompts], timeout=seconds)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    failures = [failure for task in done if (failure := task.result())]
    return Answers(len(done) - len(failures), failures, len(pending))


async def health(url: str) -> str:
    """What `/health` says: a busy server may be late to answer, a dead one refuses or answers 503."""
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health") as response:
            return "lives" if response.status == 200 else f"died: /health {response.status}"
    except TimeoutError:
        return "no answer in 10 s"
    except aiohttp.ClientError as error:
        return f"died: {type(error).__name__}"


def draw_prompts(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Random tokens, which no prefix cache has."""
    rng = random.Random(seed)
    return [[rng.randrange(300, LARGEST_TOKEN) for _ in range(tokens)] for _ in range(requests)]


def measure(url: str, case: Case, run: Run) -> None:
    """Put every load on one server, until it dies or time is up."""
    run.memory.restart()
    print(f"  idle: {run.memory.now:,} MiB", flush=True)
    prefill_peak = 0
    for name in run.options.loads:
        prompts = draw_prompts(run.options.requests, run.options.tokens, seed=list(LOADS).index(name))
        limit = min(run.options.load_seconds, run.seconds_left)
        if limit <= 0:
            run.add(case, name, "not measured: the time is up")
            continue
        run.memory.restart()
        start = time.perf_counter()
        answers = asyncio.run(send_all(url, LOADS[name], prompts, limit))
        seconds = time.perf_counter() - start
        peak, state = run.memory.peak, asyncio.run(health(url))
        if name == "prefill":
            prefill_peak = peak
        run.add(
            case,
            *(name, f"{peak:,}", f"{peak - prefill_peak:+,}" if prefill_peak else "-"),
            *(f"{answers.answered} of {len(prompts)}", str(len(answers.failures))),
            f"not finished after {seconds:.0f}" if answers.unanswered else f"{seconds:.1f}",
            state,
        )
        if answers.failures:
            print(f"    first failure: {answers.failures[0]}", flush=True)
        if state.startswith("died"):
            break


def run_case(case: Case, model: Path, run: Run) -> None:
    """Start one server, measure it, stop it, and say what its log has of memory and of its end."""
    if run.seconds_left < LEAST_SECONDS:
        run.add(case, f"not started: {run.seconds_left:.0f} s are left")
        return
    print(case, flush=True)
    settings, log = SERVERS[case.server], run.options.logs / case.log_name
    gpu = {"CUDA_VISIBLE_DEVICES": str(run.options.gpu)} if run.options.gpu is not None else {}
    start = time.monotonic()
    try:
        with running_server(
            model,
            *("--load-format", "dummy", "--gpu-memory-utilization", "0.95", "--served-model-name", "m"),
            # Stock vLLM refuses a prompt as long as the context.
            *("--max-model-len", str(run.options.tokens + 16), "--max-num-batched-tokens", "8192"),
            *(*run.flags, *settings.flags),
            log=log,
            environment={**(settings.environment or {}), **RUNNERS[case.runner], **gpu},
            command=settings.command,
            start_seconds=run.seconds_left,
            stop_seconds=STOP_SECONDS,
        ) as url:
            print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)
            measure(url, case, run)
    except ServerError as error:
        run.add(case, f"did not start: {str(error).splitlines()[0]}")
    tell_of_log(log)


def tell_of_log(log: Path) -> None:
    """The model runner, and the first lines about memory or the engine's end."""
    lines = log.read_text(errors="replace").splitlines()
    print(f"  log: {'V2' if any('Using V2 Model Runner' in line for line in lines) else 'V1'} model runner")
    for sign in ("out of memory", "EngineDeadError", "Engine core initialization failed"):
        found = [line for line in lines if sign.lower() in line.lower()]
        print(f"  log: {len(found)} lines with {sign!r}", *(f"    {line[:300]}" for line in found[:1]), sep="\n")
    sys.stdout.flush()


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Options, and the servers' flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shape", default="1b", help="of bench/shapes.py")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[262144, 128256])
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=["default"], help="vLLM's model runners")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--tokens", type=int, default=8192, help="a request")
    parser.add_argument("--requests", type=int, default=64, help="in flight")
    parser.add_argument("--load-seconds", type=float, default=600, help="for each load")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--gpu", type=int, help="index; default: the first, and the environment as it is")
    return parser.parse_known_args()


def cases(options: argparse.Namespace) -> Sequence[Case]:
    """Every vocabulary on every runner with every server; stock and ours of a kind in a row."""
    return [
        Case(vocab_size, runner, server)
        for vocab_size in options.vocabularies
        for runner in options.runners
        for server in options.servers
    ]


def main() -> None:
    """Every case, one server at a time, and the table."""
    options, flags = parse()
    print(f"{time.strftime('%Y-%m-%d')}, {options}, servers' flags: {flags}", flush=True)
    with tempfile.TemporaryDirectory() as folder, sampled_memory(options.gpu or 0) as memory:
        run = Run(options, flags, memory, time.monotonic() + options.time_limit)
        with suppress(KeyboardInterrupt):
            for case in cases(options):
                model = write_model(options.shape, case.vocab_size, options.tokenizer, Path(folder))
                run_case(case, model, run)
        print(HEAD, *run.rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
