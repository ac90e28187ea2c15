"""Loads for a server: requests drawn at random, the same for every build of a turn, and the rate of their answers.

prefill    2,047 random tokens, one token generated          echo       the same with `echo` and `logprobs: 1`
score      the same tokens through `/v1/score`, base64       top50      the same with the top 50 tokens
trl        the same with `prompt_logprobs: 100`, as TRL asks a teacher
unshared   256 random tokens, `echo` and `logprobs: 1`
choices    701 tokens, echoed: 600 shared by all, 100 by four requests, 1 of its own
mmlu       a subject's questions to `/v1/score`, 32 per request: 600 to 900 shared tokens, 80 to 160 own, four letters
questions  such prompts as prefill, one per request, to compare questions per second with
alone      1,023 random tokens through `/v1/score`, one request after another
record     windows of 2,048 tokens, recorded as a reference by one request
kld        the windows of such a reference, one per request to `/v1/kld`; each server has recorded it once
windows    prefill of windows of 2,048 tokens of a text, 512 apart
text       the same windows by the whole command `ppl-client`, from its start as a process to its end
documents  prefill of documents of 64 to 2,000 random tokens
corpus     such documents by the whole command `ppl-client corpus`, from jsonl.zst to parquet

64 requests are in flight unless they are sent one after another. No load finds its tokens in a prefix cache.
"""

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from tokenizers import Tokenizer

IN_FLIGHT = 64
TIMEOUT_SECONDS = 900
WINDOW, STRIDE = 2048, 512
CHARACTERS_PER_TOKEN = 8
"""More than English has, so that a text cut to this is still long enough."""
SHORTEST, LONGEST = 64, 2000

PREFILL = {"max_tokens": 1, "temperature": 0}
ECHO = {**PREFILL, "echo": True, "logprobs": 1}
SCORE = {"encoding_format": "base64"}
TOP50 = {**SCORE, "top_logprobs": 50}
STATISTICS = {**SCORE, "statistics": ["entropy", "std_logprob"]}
SINK = {**SCORE, "sinks": {"token_mass": [300, 400, 500]}}
"""The package of docs/extend.md, which a build needs next to Scoremode."""
DECODE = {**SCORE, "lane": "decode", "context": 33}
TRL = {**PREFILL, "temperature": 1.0, "prompt_logprobs": 100}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rate:
    """The measured rate of a load."""

    tokens: int
    requests: int
    seconds: float
    received_bytes: int = 0
    failed: int = 0
    latencies: Sequence[float] = ()
    """Seconds from each request's arrival to the end of its answer; infinite if it failed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tokenizer and a text, from which requests are made."""

    tokenizer: Path
    text: str


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the environment of a client of the same build."""

    url: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The requests of a load. Only `send` is timed."""

    send: Callable[[Target], Rate]
    before: Callable[[Target], object] = lambda target: None
    after: Callable[[Target], None] = lambda target: None


@dataclass(frozen=True, slots=True)
class Load:
    """How a load is drawn, from a source, a number of requests, and a seed."""

    draw: Callable[[Source, int, str], Drawn]
    count: int
    """How many requests (windows, documents): 2 to 5 seconds of an H200 on the 8B shape."""
    count_1b: int = 0
    """On 1B shapes, if it is another number."""
    floor: str = ""
    """The load that a report compares its rate of tokens with."""
    is_on_stock: bool = False

    def usual_count(self, shape: str) -> int:
        """The number of requests on a shape."""
        return self.count_1b if shape.startswith("1b") and self.count_1b else self.count


def random_tokens(rng: random.Random, length: int) -> list[int]:
    """From a range without special tokens."""
    return [rng.randrange(300, 49000) for _ in range(length)]


async def send_all(
    url: str,
    bodies: Sequence[Body],
    in_flight: int = IN_FLIGHT,
    timeout_seconds: float = TIMEOUT_SECONDS,
    arrivals: Iterable[float] = repeat(0.0),
) -> Rate:
    """Post every body to one address, each not before it arrives, in seconds from the start.

    A request without an answer in time, or with another status than 200, has failed.
    """
    slots = asyncio.Semaphore(in_flight)
    timeout, connector = aiohttp.ClientTimeout(total=timeout_seconds), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(body: Body, arrival: float) -> tuple[int, bool, float]:
            await asyncio.sleep(start + arrival - time.perf_counter())
            try:
                async with slots, session.post(url, json=body) as response:
                    received, has_failed = len(await response.read()), response.status != 200
            except (aiohttp.ClientError, TimeoutError):
                received, has_failed = 0, True
            return received, has_failed, math.inf if has_failed else time.perf_counter() - start - arrival

        start = time.perf_counter()
        answers = await asyncio.gather(*map(send, bodies, arrivals))
        seconds = time.perf_counter() - start
    received, failures, latencies = zip(*answers, strict=True)
    tokens = sum(len(body.get("prompt", ())) + sum(map(len, body.get("continuations", ()))) for body in bodies)
    return Rate(tokens, len(bodies), seconds, sum(received), sum(failures), latencies)


async def generate(url: str, prompts: Sequence[list[int]], max_tokens: int, **options: object) -> list[Body]:
    """The choices, in the order of prompts, of one request that has all of them answered greedily."""
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **options}
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
        answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
    return sorted(answer.json()["choices"], key=itemgetter("index"))


def bodies_to(path: str, bodies: Sequence[Body], in_flight: int = IN_FLIGHT) -> Drawn:
    """Requests to one route."""
    return Drawn(lambda target: asyncio.run(send_all(target.url + path, bodies, in_flight)))


def draw_prompts(
    path: str, options: Body, source: Source, count: int, seed: str, *, length: int = 2047, in_flight: int = IN_FLIGHT
) -> Drawn:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    bodies = [{"prompt": random_tokens(rng, length), **options} for _ in range(count)]
    return bodies_to(path, bodies, in_flight)


def completions(prompts: Sequence[list[int]], options: Body) -> Drawn:
    """Requests to `/v1/completions`."""
    return bodies_to("/v1/completions", [{"prompt": prompt, **options} for prompt in prompts])


def draw_choices(source: Source, count: int, seed: str) -> Drawn:
    rng = random.Random(seed)
    shared = random_tokens(rng, 600)
    questions = [shared + random_tokens(rng, 100) for _ in range(count // 4)]
    return completions([question + random_tokens(rng, 1) for question in questions for _ in range(4)], ECHO)


def draw_mmlu(source: Source, count: int, seed: str, *, prefill: bool = False) -> Drawn:
    rng = random.Random(seed)
    shared = random_tokens(rng, rng.randint(600, 900))
    prompts = [shared + random_tokens(rng, rng.randint(80, 160)) for _ in range(count)]
    if prefill:
        return completions(prompts, PREFILL)
    letters = [[letter] for letter in random_tokens(rng, 4)]
    parts = [prompts[start : start + 32] for start in range(0, count, 32)]
    bodies = [{"prompt": part, "continuations": [letters] * len(part), **SCORE} for part in parts]
    done = bodies_to("/v1/score", bodies, 16)
    return Drawn(lambda target: replace(done.send(target), tokens=sum(map(len, prompts)), requests=count))


def forget(url: str, name: str) -> None:
    """Delete a reference."""
    httpx.delete(f"{url}/v1/references/{name}", timeout=TIMEOUT_SECONDS).raise_for_status()


def record(url: str, name: str, windows: Sequence[Sequence[int]], timeout_seconds: float = TIMEOUT_SECONDS) -> Rate:
    """Record a server's model as a reference over these windows, which are of one length."""
    # `disjoint` leaves out a window that ends with the text.
    tokens = [token for window in windows for token in window] + [windows[0][0]]
    body = {"name": name, "prompt": tokens, "method": "disjoint", "context_length": len(windows[0])}
    start = time.perf_counter()
    response = httpx.post(f"{url}/v1/references", json=body, timeout=timeout_seconds)
    if response.is_error:
        raise RuntimeError(f"{response.url}: {response.text}")
    seconds = time.perf_counter() - start
    found = response.json()
    if found["num_windows"] != len(windows):
        raise RuntimeError(f"{found['num_windows']} windows of {len(windows)} were recorded")
    print(f"    {found['disk_bytes']:,} bytes on disk for {found['num_scored']:,} tokens", flush=True)
    return Rate(len(tokens) - 1, len(windows), seconds, len(response.content))


def draw_record(source: Source, count: int, seed: str) -> Drawn:
    rng = random.Random(seed)
    windows = [random_tokens(rng, WINDOW) for _ in range(count)]
    return Drawn(
        lambda target: record(target.url, "recorded", windows), after=lambda target: forget(target.url, "recorded")
    )


@cache
def recorded(url: str, count: int) -> str:
    """The name of a server's reference with this many windows."""
    name = f"kld-{httpx.URL(url).port}-{count}"
    record(url, name, [random_tokens(random.Random(index), WINDOW) for index in range(count)])
    return name


def draw_kld(source: Source, count: int, seed: str) -> Drawn:
    def send(target: Target, num_windows: int = count) -> Rate:
        reference = recorded(target.url, count)
        bodies = [{"reference": reference, "windows": [index, index + 1], **SCORE} for index in range(num_windows)]
        return replace(asyncio.run(send_all(f"{target.url}/v1/kld", bodies)), tokens=num_windows * WINDOW)

    # The first request, which is not timed, loads the reference's LM head: an idle one is released.
    return Drawn(send, before=partial(send, num_windows=1))


def piece_of(name: str, count: int, seed: str) -> str:
    """A part of a text, repeated if it is too short, that has `count` windows."""
    from scoremode.runs.corpora import load_corpus

    text = load_corpus(name).text
    size = CHARACTERS_PER_TOKEN * (WINDOW + count * STRIDE)
    start = random.Random(seed).randrange(len(text))
    return (text * (size // len(text) + 2))[start : start + size]


def draw_windows(source: Source, count: int, seed: str) -> Drawn:
    tokens = tokenizer_in(source.tokenizer).encode(piece_of(source.text, count, seed)).ids
    return completions([tokens[STRIDE * index :][:WINDOW] for index in range(count)], PREFILL)


def draw_text(source: Source, count: int, seed: str) -> Drawn:
    return Drawn(partial(run_text, piece_of(source.text, count, seed), count))


def run_text(text: str, count: int, target: Target) -> Rate:
    """Have `ppl-client` measure a text of this many windows."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "text.txt", Path(folder) / "output.json"
        file.write_text(text)
        seconds = client(
            target,
            *("--text-file", str(file), "--method", "overlapping", "--output", str(output)),
            *("--context-length", str(WINDOW), "--stride", str(STRIDE), "--max-tokens", str(WINDOW + count * STRIDE)),
        )
        found = json.loads(output.read_text())
    if len(found["windows"]) != count:
        raise RuntimeError(f"{len(found['windows'])} windows of {count} were measured")
    print(f"    ppl-client took {found['seconds']:.2f} s from its first request to its last answer", flush=True)
    return Rate(count * WINDOW, count, seconds)


def client(target: Target, *arguments: str) -> float:
    """Seconds of a `ppl-client` of the server's build."""
    command = [sys.executable, "-m", "scoremode.cli", *arguments, "--url", target.url, "--quiet"]
    start = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **target.environment}, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()[-500:]}")
    return seconds


def draw_documents(source: Source, count: int, seed: str) -> Drawn:
    rng = random.Random(seed)
    prompts = [random_tokens(rng, rng.randint(SHORTEST, LONGEST)) for _ in range(count)]
    return completions(prompts, PREFILL)


@cache
def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def words_of(folder: Path) -> list[str]:
    """The tokens that are a space and letters."""
    tokenizer = tokenizer_in(folder)
    words = map(tokenizer.decode, ([token] for token in range(300, tokenizer.get_vocab_size())))
    return [word for word in words if word.isascii() and word.startswith(" ") and word[1:].isalpha()]


def draw_corpus(source: Source, count: int, seed: str) -> Drawn:
    rng, words = random.Random(seed), words_of(source.tokenizer)
    texts = ["".join(rng.choices(words, k=rng.randint(SHORTEST, LONGEST))) for _ in range(count)]
    return Drawn(partial(run_corpus, texts))


def run_corpus(texts: Sequence[str], target: Target) -> Rate:
    """Have `ppl-client corpus` score documents."""
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        documents, output = Path(folder) / "documents.jsonl.zst", Path(folder) / "scored"
        with pyarrow.output_stream(str(documents), compression="detect") as stream:
            for text in texts:
                stream.write(json.dumps({"text": text}).encode() + b"\n")
        seconds = client(target, "corpus", str(documents), "--output", str(output))
        scored = parquet.read_table(output / "documents.parquet", columns=["num_tokens"]).column(0).to_pylist()
    if len(scored) != len(texts) or None in scored:
        raise RuntimeError("documents were not scored")
    return Rate(sum(scored), len(texts), seconds)


LOADS: dict[str, Load] = {
    "score": Load(partial(draw_prompts, "/v1/score", SCORE), 96, 256, floor="prefill"),
    "echo": Load(partial(draw_prompts, "/v1/completions", ECHO), 96, 256, floor="prefill", is_on_stock=True),
    "choices": Load(draw_choices, 400, is_on_stock=True),
    "unshared": Load(
        partial(draw_prompts, "/v1/completions", ECHO, length=256), 800, 1500, floor="prefill", is_on_stock=True
    ),
    "prefill": Load(partial(draw_prompts, "/v1/completions", PREFILL), 96, 256, is_on_stock=True),
    "top50": Load(partial(draw_prompts, "/v1/score", TOP50), 96, 256, floor="prefill"),
    "statistics": Load(partial(draw_prompts, "/v1/score", STATISTICS), 96, 256, floor="score"),
    "sink": Load(partial(draw_prompts, "/v1/score", SINK), 96, 256, floor="score"),
    "decode": Load(partial(draw_prompts, "/v1/score", DECODE, length=161), 48),
    "trl": Load(partial(draw_prompts, "/v1/completions", TRL), 32, 64, floor="prefill", is_on_stock=True),
    "mmlu": Load(draw_mmlu, 512, 2048, floor="questions"),
    "questions": Load(partial(draw_mmlu, prefill=True), 512, 2048, is_on_stock=True),
    "alone": Load(partial(draw_prompts, "/v1/score", SCORE, length=1023, in_flight=1), 50),
    "record": Load(draw_record, 128, floor="score"),
    "kld": Load(draw_kld, 128, floor="score"),
    "windows": Load(draw_windows, 73, is_on_stock=True),
    "text": Load(draw_text, 73, floor="windows"),
    "documents": Load(draw_documents, 400, 2000, is_on_stock=True),
    "corpus": Load(draw_corpus, 400, 2000, floor="documents"),
}
