"""A long mixed load on a small server: are all answers right, is anything left over, does a process grow?

    python bench/soak.py MODEL LOGS [OPTION...] [any vllm serve flag]

MODEL is a model folder, LOGS a folder for the server's log and for all figures (soak.json). The right logprobs are
computed first, by transformers in float32. Then a server starts with a KV cache of 4,096 tokens and 8 MiB for rows;
flags given here go after `FLAGS` and win. A warm-up touches all of the one and fills the other, and goes on with the
load itself for a tenth of its minutes.

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
import base64
import json
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import aiohttp
import httpx
import numpy as np
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench"), str(ROOT)]

from tables import table  # noqa: E402

from local_server import ServerProcess, server_process  # noqa: E402
from scoremode.corpora import load_corpus  # noqa: E402
from scoremode.windows import Window, cut_windows  # noqa: E402
from tests import oracle  # noqa: E402

FLAGS = (
    *("--served-model-name", "soak", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--block-size", "32", "--num-gpu-blocks-override", "128", "--score-cache-bytes", "8M"),
)
BAR = 2e-3
"""Nats by which a token's logprob may differ from the oracle's, in float32."""
SHARED_BY = 4
"""Sequences with one beginning."""
LARGEST_TEXT = 1500
"""Characters, fewer than 1,024 tokens."""
WINDOWS = {"method": "sliding", "context_length": 128, "stride": 64}
HANG_UP_SHARE = 0.1
SAMPLE_SECONDS = 2.0
ANSWER_SECONDS = 300
"""A request without an answer for so long has failed."""
IDLE_SECONDS = 60
"""In which the server has to be done with everything after the last client has gone."""
IDLE_GAUGES = (
    *("scoremode_waiting_sequences", "scoremode_running_sequences"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
)
PATHS = ("/v1/score", "/v1/completions", "/v1/perplexity")
WARM_UP_SHARE = 0.1
LEAST_WARM_UP_SECONDS = 30
PROBLEMS_SHOWN = 20
MIB = 1024**2


class WrongAnswerError(Exception):
    """An answer of status 200 that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, and what its tokens should score."""

    text: str
    token_ids: list[int]
    logprobs: np.ndarray
    """[tokens] in nats; the first, which has no context, is NaN."""
    window_nlls: list[tuple[int, float]]
    """Of each of `WINDOWS`: tokens scored, and the sum of their NLLs in nats."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and what reads its answer: the largest difference from the oracle, in nats a token.

    `difference` raises `WrongAnswerError`.
    """

    path: str
    body: dict[str, Any]
    difference: Callable[[bytes], float]


def make_passages(model: Path, count: int, rng: random.Random) -> list[Passage]:
    """Pieces of the Python language reference."""
    text, tokenizer = load_corpus("pydoc").text, AutoTokenizer.from_pretrained(model)
    starts = [rng.randrange(len(text) - LARGEST_TEXT) for _ in range(-(-count // SHARED_BY))]
    passages = []
    for index in range(count):
        start = starts[index // SHARED_BY]
        piece = text[start : start + rng.randrange(20, LARGEST_TEXT)]
        passages.append(make_passage(piece, tokenizer(piece)["input_ids"], lambda tokens: _logprobs(model, tokens)))
    return passages


def make_passage(text: str, token_ids: list[int], logprobs: Callable[[list[int]], np.ndarray]) -> Passage:
    """`logprobs` gives those of all tokens of a sequence but the first."""
    windows = cut_windows(len(token_ids), **WINDOWS)
    return Passage(
        text,
        token_ids,
        np.concatenate([[np.nan], logprobs(token_ids)]),
        [(window.num_scored, _window_nll(window, token_ids, logprobs)) for window in windows],
    )


def _window_nll(window: Window, token_ids: list[int], logprobs: Callable[[list[int]], np.ndarray]) -> float:
    return -float(logprobs(window.token_ids(token_ids))[window.first_scored - 1 :].sum(dtype=np.float64))


def _logprobs(model: Path, token_ids: list[int]) -> np.ndarray:
    (result,) = oracle.logprobs(model, [token_ids])
    return result


def draw_ask(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """Any request of the load."""
    draw = rng.choices((draw_score, draw_continuations, draw_completion, draw_perplexity), (3, 2, 3, 2))[0]
    return draw(passages, rng)


def draw_score(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """One prompt or several to `/v1/score`, as texts or as token ids."""
    prompt, expected = draw_prompt(passages, rng)
    return score_ask({"prompt": prompt}, expected, rng)


def draw_continuations(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """The rest of a passage after a prompt, and the beginning of that rest."""
    passage = rng.choice(passages)
    split = rng.randrange(1, len(passage.token_ids))
    end = rng.randrange(split, len(passage.token_ids)) + 1
    continuations = [passage.token_ids[split:], passage.token_ids[split:end]]
    body = {"prompt": passage.token_ids[:split], "continuations": continuations}
    return score_ask(body, [passage.logprobs[split:], passage.logprobs[split:end]], rng)


def score_ask(body: dict[str, Any], expected: Sequence[np.ndarray], rng: random.Random) -> Ask:
    """`body` with any options."""
    options = {
        "top_logprobs": rng.choice((0, 0, 1, 5, 20)),
        "return_ranks": rng.random() < 0.3,
        "return_tokens": rng.random() < 0.3,
        "encoding_format": rng.choice(("float", "base64")),
        "use_cache": rng.random() < 0.8,
        # Salts make several copies of a prefix, so that the caches go on dropping what they have.
        "cache_salt": rng.choice((None, None, "a", "b", "c")),
    }
    return Ask("/v1/score", body | options, lambda answer: score_difference(answer, expected))


def draw_completion(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """One prompt or several to `/v1/completions`, echoed."""
    prompt, expected = draw_prompt(passages, rng)
    generated = rng.choice((0, 1))
    options = {"echo": True, "logprobs": rng.choice((0, 1, 5)), "max_tokens": generated, "temperature": 0}
    body = {"prompt": prompt} | options
    return Ask("/v1/completions", body, lambda answer: echo_difference(answer, expected, generated))


def draw_perplexity(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """A stream of a passage's windows."""
    passage = rng.choice(passages)
    body = {"prompt": passage.token_ids, "stream": True, **WINDOWS}
    return Ask("/v1/perplexity", body, lambda answer: stream_difference(answer, passage.window_nlls))


def draw_prompt(passages: Sequence[Passage], rng: random.Random) -> tuple[Any, list[np.ndarray]]:
    """Any of the four shapes of a prompt, and the logprobs of each sequence."""
    chosen = rng.sample(passages, rng.choice((1, 1, 2, 4)))
    prompts = [passage.text for passage in chosen] if rng.random() < 0.5 else [each.token_ids for each in chosen]
    return prompts if len(chosen) > 1 else prompts[0], [passage.logprobs for passage in chosen]


def score_difference(answer: bytes, expected: Sequence[np.ndarray]) -> float:
    """Of an answer of `/v1/score`.

    Raises:
        WrongAnswerError: it is about other tokens than asked for.
    """
    results = [result["logprobs"] for result in json.loads(answer)["data"]]
    return largest_difference([decoded(logprobs) for logprobs in results], expected)


def echo_difference(answer: bytes, expected: Sequence[np.ndarray], generated: int) -> float:
    """Of an answer of `/v1/completions`, without so many generated tokens of each sequence.

    Raises:
        WrongAnswerError: it is about other tokens than asked for.
    """
    choices = [decoded(choice["logprobs"]["token_logprobs"]) for choice in json.loads(answer)["choices"]]
    return largest_difference([choice[: len(choice) - generated] for choice in choices], expected)


def decoded(logprobs: list[float | None] | str) -> np.ndarray:
    """Logprobs in either encoding, NaN where there is none."""
    if isinstance(logprobs, str):
        return np.frombuffer(base64.b64decode(logprobs), dtype="<f4")
    return np.array(logprobs, dtype=np.float64)


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Of any token, in nats.

    Raises:
        WrongAnswerError: the numbers of sequences or tokens differ, or what has a logprob.
    """
    if [len(each) for each in found] != [len(each) for each in expected]:
        raise WrongAnswerError(f"{[len(each) for each in found]} tokens in place of {[len(each) for each in expected]}")
    one, other = np.concatenate(found), np.concatenate(expected)
    if not np.array_equal(np.isnan(one), np.isnan(other)):
        raise WrongAnswerError(
            f"no logprob at {np.flatnonzero(np.isnan(one))}, expected at {np.flatnonzero(np.isnan(other))}"
        )
    return float(np.nanmax(np.abs(one - other), initial=0))


def stream_difference(answer: bytes, window_nlls: Sequence[tuple[int, float]]) -> float:
    """Of the windows of an event stream of `/v1/perplexity`, and of the result after them.

    Raises:
        WrongAnswerError: the stream ends early, has an error in it, or its windows are not these.
    """
    events = answer.decode().removesuffix("\n\n").split("\n\n")
    if events.pop() != "data: [DONE]":
        raise WrongAnswerError(f"a stream that ends with {answer[-200:]!r}")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    if failed := [event for event in found if "error" in event]:
        raise WrongAnswerError(f"an error in a stream: {failed[0]}")
    expected = [*window_nlls, (sum(scored for scored, _ in window_nlls), sum(nll for _, nll in window_nlls))]
    if [event["num_scored"] for event in found] != [scored for scored, _ in expected]:
        raise WrongAnswerError(f"windows of {[event['num_scored'] for event in found]} tokens in place of {expected}")
    return max(abs(event["nll_sum"] - nll) / scored for event, (scored, nll) in zip(found, expected, strict=True))


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


def check(ask: Ask, status: int, answer: bytes) -> float:
    """The largest difference of a token's logprob from the oracle's, in nats.

    Raises:
        WrongAnswerError: it is no answer, not the one that was asked for, or beyond `BAR`.
    """
    if status != 200:
        raise WrongAnswerError(f"{status} {answer[:300]!r}")
    try:
        difference = ask.difference(answer)
    except (ValueError, LookupError, TypeError) as error:
        raise WrongAnswerError(f"{error!r}, reading {answer[:300]!r}") from error
    if not difference <= BAR:
        raise WrongAnswerError(f"{difference:.2g} nats beside the oracle")
    return difference


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


def metric(text: str, name: str) -> float:
    """A metric of `/metrics`, summed over its labels.

    Raises:
        ValueError: there is none of this name.
    """
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise ValueError(f"/metrics has no {name}")
    return sum(map(float, values))


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process."""

    name: str
    num_bytes: int
    """Its share of memory that is not of files, swapped out or not."""
    open_files: int


def usage(server: int) -> dict[int, Usage]:
    """Process id -> usage, for every process of the session that a server leads."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end between the listing and the reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.getsid(int(folder.name)) == server:
                found[int(folder.name)] = Usage(
                    (folder / "comm").read_text().strip(),
                    own_bytes((folder / "smaps_rollup").read_text()),
                    len(list((folder / "fd").iterdir())),
                )
    return found


def own_bytes(smaps_rollup: str) -> int:
    """Of /proc/PID/smaps_rollup, the proportional set size of all but files."""
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB$", smaps_rollup, re.MULTILINE)}
    return 1024 * sum(kilobytes[name] for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))


class Processes:
    """A server's processes, looked at again and again."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.samples = [usage(server)]

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.samples.append(await asyncio.to_thread(usage, self.server))


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process's memory, in bytes: means of the first and of the last tenth of the samples."""

    HEADER: ClassVar = ("process", "first tenth, MiB", "last tenth, MiB", "growth")

    name: str
    first: float
    last: float

    @property
    def share(self) -> float:
        return self.last / self.first - 1

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return self.name, f"{self.first / MIB:,.1f}", f"{self.last / MIB:,.1f}", f"{self.share:+.2%}"

    def __str__(self) -> str:
        return f"{self.name} grew from {self.first / MIB:,.1f} to {self.last / MIB:,.1f} MiB, {self.share:+.2%}"


def growths(samples: Sequence[Mapping[int, Usage]]) -> list[Growth]:
    """Of every process that is in all samples."""
    tenth = max(1, len(samples) // 10)

    def mean(pid: int, some: Sequence[Mapping[int, Usage]]) -> float:
        return fmean(sample[pid].num_bytes for sample in some)

    lasting = set.intersection(*map(set, samples))
    return [
        Growth(f"{samples[0][pid].name} ({pid})", mean(pid, samples[:tenth]), mean(pid, samples[-tenth:]))
        for pid in sorted(lasting)
    ]


def left_over(before: Mapping[int, Usage], after: Mapping[int, Usage], clients: int) -> Iterator[str]:
    """Processes and open files of an idle server that were not there before the load; processes that are gone."""
    for pid in sorted(before.keys() ^ after.keys()):
        yield f"{'a process is gone' if pid in before else 'a process is new'}: {(before | after)[pid].name} ({pid})"
    for pid in sorted(before.keys() & after.keys()):
        if (more := after[pid].open_files - before[pid].open_files) >= clients:
            yield f"{after[pid].name} ({pid}) has {more} more open files"


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


@asynccontextmanager
async def sampled_usage(server: int) -> AsyncIterator[list[dict[int, Usage]]]:
    """A list that gets the server's usage every `SAMPLE_SECONDS`."""
    samples = [usage(server)]

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(await asyncio.to_thread(usage, server))

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()


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
