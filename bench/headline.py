"""A perplexity run over WikiText-2 through `ppl-client`, beside the floor: a pure prefill of the same windows.

    python bench/headline.py TOKENIZER TEXT LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, TEXT what `ppl-client --dataset` reads, LOGS a folder for logs. The
default is 73 overlapping windows of 2,048 tokens, 512 apart, 149,431 evaluations, on the shape of an 8B model in W4A16.
A 70B model over the whole split, on two GPUs:

    python bench/headline.py TOKENIZER TEXT LOGS --shape 70b-w4a16 --tensor-parallel-size 2 --max-tokens 0 --turns 1 \\
        --methods disjoint sliding --floors disjoint --servers scoremode \\
        --gpu-memory-utilization 0.6 --kv-cache-memory-bytes 32G

The floor sends each window's tokens to `/v1/completions` with one token to generate, 64 in flight. Every run starts
with empty caches. `command` is the whole of `ppl-client`, with its start and the tokenizing of the text; `scoring` is
what it reports itself, from its first request for scores to the last answer.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import STOCK, Settings, started  # noqa: E402

from local_server import ServerError  # noqa: E402
from scoremode import ScoreClient  # noqa: E402
from scoremode.corpora import load_corpus  # noqa: E402
from scoremode.windows import STRIDED_METHODS, Method, cut_windows  # noqa: E402

OURS = "scoremode"
SERVERS = {"stock": STOCK, OURS: Settings()}
# Its route for the reset of the prefix cache is one of vLLM's development mode.
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
METHODS: tuple[Method, ...] = ("overlapping", "disjoint", "sliding")
MAX_TOKENS = 39_424
"""2,048 + 73 * 512 tokens, the most that make 73 overlapping windows."""
WARM_UP_WINDOWS = 8


@dataclass(slots=True)
class Row:
    """What came of one method: seconds of every turn."""

    windows: int
    evaluations: int
    command: list[float] = field(default_factory=list)
    scoring: list[float] = field(default_factory=list)
    floors: dict[str, list[float]] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Best seconds, and their ratios to the best floor."""
        floors = {server: min(seconds) for server, seconds in self.floors.items() if seconds}
        command, scoring = min(self.command, default=None), min(self.scoring, default=None)
        least = min(floors.values(), default=None)
        prefills = (floors.get(server) for server in SERVERS)
        seconds = (_seconds(value) for value in (command, scoring, *prefills))
        ratios = (f"{value / least:.2f}" if value and least else "-" for value in (command, scoring))
        return [f"{self.windows:,}", f"{self.evaluations:,}", *seconds, *ratios]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Options, and the servers' flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shape", default="8b-w4a16", help="of bench/shapes.py")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["overlapping"])
    parser.add_argument("--floors", nargs="*", choices=METHODS, help="methods whose prefill is timed; default: all")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="0 for all of the text")
    parser.add_argument("--concurrency", type=int, default=load.IN_FLIGHT, help="of ppl-client")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_known_args()


def windows_of(tokens: list[int], method: Method, options: argparse.Namespace) -> tuple[list[list[int]], int]:
    """The token ids of every window, and how many of them are evaluated."""
    stride = options.stride if method in STRIDED_METHODS else None
    windows = cut_windows(len(tokens), method, options.context_length, stride)
    return [window.token_ids(tokens) for window in windows], sum(window.num_scored for window in windows)


def empty_caches(url: str) -> None:
    """Drop what earlier runs left; vLLM refuses while blocks of the last request are not free yet."""
    for _ in range(50):
        if httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status().json()["success"]:
            return
        time.sleep(0.1)
    raise RuntimeError("the server does not reset its prefix cache")


def prefill(url: str, shape: str, windows: list[list[int]]) -> float:
    """Seconds that a server takes for nothing but the windows' prefill."""
    bodies = [{"model": shape, "prompt": window, "max_tokens": 1, "temperature": 0} for window in windows]
    rate = asyncio.run(load.send_all(f"{url}/v1/completions", bodies))
    if rate.failed:
        raise RuntimeError(f"{rate.failed} of {rate.requests} requests failed")
    return rate.seconds


def client_run(url: str, method: Method, options: argparse.Namespace, max_tokens: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a whole `ppl-client`, and its record."""
    record = options.logs / f"headline-{options.shape}-{method}.json"
    arguments = ["--url", url, "--dataset", str(options.text), "--output", str(record), "--quiet"]
    arguments += ["--method", method, "--context-length", str(options.context_length)]
    arguments += ["--stride", str(options.stride)] if method in STRIDED_METHODS else []
    arguments += ["--max-tokens", str(max_tokens)] if max_tokens else []
    arguments += ["--concurrency", str(options.concurrency)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "scoremode.cli", *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"ppl-client: {done.stderr.strip()[-500:]}")
    return seconds, json.loads(record.read_text())


def attempt(what: str, run: Callable[[], float]) -> float | None:
    """Seconds that `run` measures, printed; None if it fails, with the reason printed: the others go on."""
    try:
        seconds = run()
    except Exception as error:
        print(f"  {what}: failed: {error!r}", flush=True)
        return None
    print(f"  {what}: {seconds:.2f} s", flush=True)
    return seconds


def turn(method: Method, row: Row, windows: list[list[int]], urls: dict[str, str], options: argparse.Namespace) -> None:
    """Measure every floor, then the job itself."""

    def floor(url: str) -> float:
        empty_caches(url)
        return prefill(url, options.shape, windows)

    def job() -> float:
        empty_caches(urls[OURS])
        seconds, record = client_run(urls[OURS], method, options, options.max_tokens)
        if (len(record["windows"]), record["num_scored"]) != (row.windows, row.evaluations):
            raise RuntimeError(f"{len(record['windows'])} windows and {record['num_scored']} evaluations")
        row.scoring.append(record["seconds"])
        print(
            f"  ppl-client {method}, scoring: {record['seconds']:.2f} s, perplexity {record['perplexity']}", flush=True
        )
        return seconds

    for server, url in urls.items():
        if options.floors is None or method in options.floors:
            seconds = attempt(f"prefill {method}, {server}", partial(floor, url))
            row.floors.setdefault(server, []).extend([] if seconds is None else [seconds])
    if OURS in urls:
        seconds = attempt(f"ppl-client {method}, command", job)
        row.command.extend([] if seconds is None else [seconds])


def tokens_of(url: str, options: argparse.Namespace) -> list[int]:
    """The text's tokens, as `ppl-client` has them of the server."""
    with ScoreClient(url, timeout=600) as client:
        tokens = client.tokenize(load_corpus(str(options.text)).text)
    return tokens[: options.max_tokens] if options.max_tokens else tokens


def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, Row]:
    """A row for each method, after a warm-up of every server and of the client."""
    tokens = tokens_of(urls[OURS], options)
    few = options.context_length + WARM_UP_WINDOWS * options.stride
    first, _ = windows_of(tokens[:few], "overlapping", options)
    for url in urls.values():
        attempt("warm-up, prefill", partial(prefill, url, options.shape, first))
    attempt("warm-up, ppl-client", lambda: client_run(urls[OURS], "overlapping", options, few)[0])
    rows: dict[str, Row] = {}
    for method in options.methods:
        windows, evaluations = windows_of(tokens, method, options)
        rows[method] = Row(len(windows), evaluations)
        for _ in range(options.turns):
            turn(method, rows[method], windows, urls, options)
    return rows


def main() -> None:
    """Start the servers, measure, print the table."""
    options, flags = parse()
    print(f"{time.strftime('%Y-%m-%d')}, {options}, servers' flags: {flags}", flush=True)
    servers = {name: with_flags(SERVERS[name], flags) for name in options.servers}
    start = time.perf_counter()
    try:
        with started([options.shape], servers, options.tokenizer, options.logs) as urls:
            print(f"  servers ready after {time.perf_counter() - start:.0f} s", flush=True)
            table(measure({server: url for (_, server), url in urls.items()}, options), options)
    except ServerError as error:
        reason, _, log = str(error).partition("\n")
        print(f"  did not start: {reason}", log[-2000:], sep="\n", flush=True)


def with_flags(settings: Settings, flags: list[str]) -> Settings:
    """A server that also takes `flags`, and whose caches can be emptied."""
    return replace(
        settings, flags=(*settings.flags, *flags), environment={**(settings.environment or {}), **DEVELOPMENT}
    )


def table(rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Best seconds of every method."""
    seconds = ("command, s", "scoring, s", "stock prefill, s", "our prefill, s")
    heads = ("method", "windows", "evaluations", *seconds, "command / floor", "scoring / floor")
    print(f"{options.shape}, best of {options.turns}", " | ".join(heads), sep="\n")
    for method, row in rows.items():
        print(" | ".join([method, *row.cells()]), flush=True)


if __name__ == "__main__":
    main()
