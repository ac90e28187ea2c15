"""A long mixed load on a small server: are all answers right, is anything left over, does a process grow?

    python bench/soak.py MODEL LOGS [OPTION...] [any vllm serve flag]

MODEL is a model folder, LOGS a folder for the server's log and for all figures (soak.json). The right logprobs are
computed first, by transformers in float32. Then a server starts with a KV cache of 4,096 tokens and 8 MiB for rows;
flags given here go after `FLAGS` and win. A warm-up touches all of the one and fills the other, has a CPU engine make
as many kernels as it keeps, and goes on with the load itself for a tenth of its minutes.

The load: clients that each have one request in flight, `/v1/score` of every kind, `/v1/completions` with `echo` and
`logprobs`, and streams of `/v1/perplexity`, over sequences of which four share each beginning; one request in ten hangs
up. Every answer is compared, token by token. A stream's windows are compared by their sum over their tokens.

The status is 1 if an answer was wrong or not 200, a gauge of waiting or running requests does not come back to 0, a
process came or went or kept an open file for every client, the server's log has a traceback, or the memory of a process
grew by more than `--growth`: mean of the last tenth of the samples against the first tenth after the warm-up. Memory is
the proportional set size without pages of files, which other processes on the machine change.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import aiohttp
import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from process_usage import Growth, Usage, growths, left_over, sampled_usage, usage  # noqa: E402
from soak_asks import Ask, Passage, WrongAnswerError, check, draw_ask, make_passages  # noqa: E402
from tables import table  # noqa: E402

from local_server import ServerProcess, server_process  # noqa: E402

FLAGS = (
    *("--served-model-name", "soak", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--block-size", "32", "--num-gpu-blocks-override", "128", "--score-cache-bytes", "8M"),
)
HANG_UP_SHARE = 0.1
ANSWER_SECONDS = 300
"""A request without an answer for so long has failed."""
IDLE_SECONDS = 60
"""In which the server has to be done with everything after the last client has gone."""
IDLE_GAUGES = (
    *("scoremode_waiting_sequences", "scoremode_running_sequences"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
)
PATHS = ("/v1/score", "/v1/completions", "/v1/perplexity")
BATCH_SIZES = 208
"""oneDNN keeps 1,024 kernels, one for each of a model's matrix shapes (Llama's are five) and each size of batch."""
WARM_UP_SHARE = 0.1
LEAST_WARM_UP_SECONDS = 30
PROBLEMS_SHOWN = 20


@dataclass(slots=True)
class Tally:
    """What came of the requests to one path."""

    HEADER: ClassVar = ("path", "right", "hung up", "anything else", "largest difference, nats")

    right: int = 0
    hung_up: int = 0
    failures: list[str] = field(default_factory=list)
    largest_difference: float = 0.0

    def row(self, path: str) -> tuple[str, ...]:
        """A line of the table."""
        counts = (self.right, self.hung_up, len(self.failures))
        return (path, *(f"{count:,}" for count in counts), f"{self.largest_difference:.1e}")


class Load:
    """Clients of one server, and what they were answered."""

    def __init__(self, url: str, passages: Sequence[Passage]) -> None:
        self.url = url
        self.passages = passages
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.last_seconds = 1.0
        """That the last answer took; clients that hang up do so before."""

    async def run(self, clients: int, seconds: float, seed: str) -> None:
        """Each client sends one request after another until the time is up, and gets its last answer."""
        end = time.monotonic() + seconds
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as session:

            async def client(rng: random.Random) -> None:
                while time.monotonic() < end:
                    hangs_up = rng.random() < HANG_UP_SHARE
                    patience = rng.uniform(0, self.last_seconds) if hangs_up else None
                    await self._send(session, draw_ask(self.passages, rng), patience)

            await asyncio.gather(*(client(random.Random(f"{seed} {number}")) for number in range(clients)))

    async def _send(self, session: aiohttp.ClientSession, ask: Ask, patience: float | None) -> None:
        """Send a request, and hang up after `patience` seconds."""
        tally = self.tallies[ask.path]
        try:
            start = time.monotonic()
            async with asyncio.timeout(patience or ANSWER_SECONDS), session.post(ask.path, json=ask.body) as response:
                answer = await response.read()
            self.last_seconds = time.monotonic() - start
            difference = check(ask, response.status, answer)
        except (TimeoutError, aiohttp.ClientError, WrongAnswerError) as error:
            if patience is not None and isinstance(error, TimeoutError):
                tally.hung_up += 1
            else:
                tally.failures.append(f"{error!r} to {json.dumps(ask.body)[:300]}")
        else:
            tally.right += 1
            tally.largest_difference = max(tally.largest_difference, difference)

    def failures(self) -> Iterator[str]:
        """Whatever was not a right answer."""
        for path, tally in self.tallies.items():
            yield from (f"{path}: {failure}" for failure in tally.failures)

    def missing(self) -> Iterator[str]:
        """Paths at which the load did not do what it is for."""
        for path in PATHS:
            if not self.tallies[path].right or not self.tallies[path].hung_up:
                yield f"{path}: {self.tallies[path].right} right answers, {self.tallies[path].hung_up} hung up"


def fill_caches(url: str) -> None:
    """Score fresh prompts until they touched the KV cache twice over and the row cache dropped something."""
    rng, text = random.Random(0), httpx.get(f"{url}/metrics").text
    config = dict(re.findall(r'(\w+)="([^"]*)"', re.search(r"^vllm:cache_config_info\{.*$", text, re.MULTILINE)[0]))
    cache_tokens, sent = int(config["num_gpu_blocks"]) * int(config["block_size"]), 0
    vocab_size = httpx.get(f"{url}/v1/score").json()["vocab_size"]
    while sent < 2 * cache_tokens or not metric(text, "scoremode_score_cache_evictions_total"):
        prompts = [[rng.randrange(vocab_size) for _ in range(512)] for _ in range(8)]
        body = {"prompt": prompts, "top_logprobs": 20, "encoding_format": "base64"}
        httpx.post(f"{url}/v1/score", json=body, timeout=ANSWER_SECONDS).raise_for_status()
        sent += sum(map(len, prompts))
        text = httpx.get(f"{url}/metrics").text
    print(f"  {sent:,} tokens filled both caches; the KV cache holds {cache_tokens:,}", flush=True)


def see_batch_sizes(url: str) -> None:
    """Score a prompt of each of the lengths up to `BATCH_SIZES`, so that a CPU engine keeps as many kernels as it ever
    does."""
    rng, vocab_size = random.Random(0), httpx.get(f"{url}/v1/score").json()["vocab_size"]
    for length in range(1, BATCH_SIZES + 1):
        body = {"prompt": [rng.randrange(vocab_size) for _ in range(length + 1)], "use_cache": False}
        httpx.post(f"{url}/v1/score", json=body, timeout=ANSWER_SECONDS).raise_for_status()


def metric(text: str, name: str) -> float:
    """A metric of `/metrics`, summed over its labels.

    Raises:
        ValueError: there is none of this name.
    """
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise ValueError(f"/metrics has no {name}")
    return sum(map(float, values))


async def until_idle(url: str) -> list[str]:
    """Wait until nothing runs or waits; else what still does after `IDLE_SECONDS`."""
    end = time.monotonic() + IDLE_SECONDS
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            text = (await client.get("/metrics")).text
            busy = [f"{name} is {value:g}" for name in IDLE_GAUGES if (value := metric(text, name))]
            if not busy or time.monotonic() > end:
                return busy
            await asyncio.sleep(0.5)


def tracebacks(log: Path) -> list[str]:
    """How many a server's log has."""
    count = log.read_text(errors="replace").count("Traceback (most recent call last)")
    return [f"{count} tracebacks in {log}"] if count else []


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a soak came to."""

    tallies: Mapping[str, Tally]
    samples: list[dict[int, Usage]]
    problems: list[str]

    def __str__(self) -> str:
        answers = [tally.row(path) for path, tally in sorted(self.tallies.items())]
        memory = [growth.row() for growth in growths(self.samples)]
        told = [f"- {problem}" for problem in self.problems[:PROBLEMS_SHOWN]]
        if len(self.problems) > PROBLEMS_SHOWN:
            told.append(f"- and {len(self.problems) - PROBLEMS_SHOWN} more")
        verdict = "\n".join(told) or "Nothing wrong, nothing left over."
        return "\n\n".join((table(Tally.HEADER, answers), table(Growth.HEADER, memory), verdict))


async def soak(server: ServerProcess, passages: Sequence[Passage], options: argparse.Namespace) -> Outcome:
    """Warm up, put the load on, wait until the server is idle, and look at what is left."""
    await asyncio.to_thread(fill_caches, server.url)
    await asyncio.to_thread(see_batch_sizes, server.url)
    seconds = 60 * options.minutes
    warm_up, load = Load(server.url, passages), Load(server.url, passages)
    await warm_up.run(options.clients, max(LEAST_WARM_UP_SECONDS, WARM_UP_SHARE * seconds), seed="warm-up")
    problems = [*warm_up.failures(), *await until_idle(server.url)]
    before = usage(server.pid)
    print("  warm", flush=True)
    async with sampled_usage(server.pid) as samples:
        await load.run(options.clients, seconds, seed="load")
    problems += [*load.failures(), *load.missing(), *await until_idle(server.url)]
    problems += left_over(before, usage(server.pid), options.clients)
    problems += [str(growth) for growth in growths(samples) if growth.share > options.growth]
    return Outcome(load.tallies, samples, problems)


def save(outcome: Outcome, file: Path) -> None:
    """Write all figures."""
    record = {
        "arguments": sys.argv[1:],
        "date": time.strftime("%Y-%m-%d"),
        "answers": {path: asdict(tally) for path, tally in outcome.tallies.items()},
        "samples": [{pid: asdict(used) for pid, used in sample.items()} for sample in outcome.samples],
        "problems": outcome.problems,
    }
    file.write_text(json.dumps(record, indent=1))


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the server's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--passages", type=int, default=96)
    parser.add_argument("--growth", type=float, default=0.03, help="share of its memory that a process may grow by")
    return parser.parse_known_args(arguments)


def main() -> None:
    """Compute what is right, start the server, soak it, print the tables."""
    options, flags = parse()
    options.logs.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%Y-%m-%d')}, {options}, server's flags: {(*FLAGS, *flags)}", flush=True)
    passages = make_passages(options.model, options.passages, random.Random(0))
    print(f"  {len(passages)} passages, {sum(len(passage.token_ids) for passage in passages):,} tokens", flush=True)
    log = options.logs / "soak.log"
    with server_process(options.model, *FLAGS, *flags, log=log) as server:
        outcome = asyncio.run(soak(server, passages, options))
        # vLLM may log one when it is stopped.
        outcome.problems.extend(tracebacks(log))
    save(outcome, options.logs / "soak.json")
    print(outcome)
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
