"""A long mixed load on a small server: are all answers right, is anything left over, does a process grow?

    python bench/soak.py MODEL LOGS [OPTION...] [any vllm serve flag]

MODEL is a model folder, LOGS a folder for the server's log and for all figures (soak.json). The right logprobs are
computed first, by transformers in float64. Then a server starts with a KV cache of 4,096 tokens and 8 MiB for rows. A
warm-up fills both, has a CPU engine make as many kernels as it keeps, and runs the load for a tenth of its minutes.

Each client has one request in flight, to `/v1/score` with any options, `/v1/completions` with `echo`, or a stream of
`/v1/perplexity`, and drops one in ten. Every answer is compared, token by token; a stream's windows by their sums.

The status is 1 if an answer was wrong or failed, requests still wait or run in the end, a process came or went or kept
an open file for every client, the log has a traceback, or a process's memory (without pages of files) grew by more
than `--growth`: mean of the last tenth of the samples compared with the first tenth after the warm-up.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from processes import Usage, growths, left_over, sample_usage, usage
from servers import WIKITEXT, ServerProcess, benchmark_parser, parsed, server_process
from tables import table
from transformers import AutoTokenizer

from scoremode import AsyncScoreClient, PerplexityWindow, ScoremodeError, cut_windows

sys.path.append(str(Path(__file__).parents[1]))

from tests import oracle
from tests.e2e.metrics import metric

FLAGS = (
    *("--served-model-name", "soak", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--block-size", "32", "--num-gpu-blocks-override", "128", "--score-cache-bytes", "8M"),
)
DROPPED_SHARE = 0.1
ANSWER_SECONDS = 300
"""A request without an answer for so long has failed."""
IDLE_SECONDS = 60
IDLE_GAUGES = (
    *("scoremode_waiting_sequences", "scoremode_running_sequences"),
    *("vllm:num_requests_waiting", "vllm:num_requests_running"),
)
LABELS = r"(?:\{.*\})?"
FILLING_REQUESTS = 16
BATCH_SIZES = 208
"""oneDNN keeps 1,024 kernels, one for each of a model's matrix shapes (Llama's are five) and each size of batch."""
WARM_UP_SHARE, LEAST_WARM_UP_SECONDS = 0.1, 30
SHARED_BY, LARGEST_TEXT = 4, 1500
"""Passages with one beginning, and their characters: fewer than 1,024 tokens."""
ANSWERS_HEADER = ("request", "right", "dropped", "anything else", "largest difference, nats")
MEMORY_HEADER = ("process", "first tenth, MiB", "last tenth, MiB", "growth")
WINDOWS = {"method": "sliding", "context_length": 128, "stride": 64}


class WrongAnswerError(Exception):
    """An answer that is not what was asked for, or too far from the oracle."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, the logprobs of its tokens (NaN for the first), and of each of `WINDOWS` tokens scored and their NLL."""

    text: str
    token_ids: list[int]
    logprobs: np.ndarray
    window_nlls: list[tuple[int, float]]


def make_passages(model: Path, count: int, rng: random.Random) -> list[Passage]:
    """Pieces of a text of the tests."""
    text, tokenizer = WIKITEXT.read_text(), AutoTokenizer.from_pretrained(model)
    starts = [rng.randrange(len(text) - LARGEST_TEXT) for _ in range(-(-count // SHARED_BY))]
    passages = []
    for index in range(count):
        start = starts[index // SHARED_BY]
        piece = text[start : start + rng.randrange(20, LARGEST_TEXT)]
        tokens = tokenizer(piece)["input_ids"]
        windows = cut_windows(len(tokens), **WINDOWS)
        logprobs, *of_windows = oracle.logprobs(model, [tokens, *(window.token_ids(tokens) for window in windows)])
        sums = [-each[window.first_scored - 1 :].sum() for window, each in zip(windows, of_windows, strict=True)]
        nlls = list(zip((window.num_scored for window in windows), sums, strict=True))
        passages.append(Passage(piece, tokens, np.concatenate([[np.nan], logprobs]), nlls))
    return passages


def largest_difference(found: Sequence[Sequence[float | None]], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of any token, in nats.

    Raises:
        WrongAnswerError: the numbers of sequences or tokens differ, or which tokens have a logprob.
    """
    if [len(each) for each in found] != [len(each) for each in expected]:
        raise WrongAnswerError(f"{[len(each) for each in found]} tokens, not {[len(each) for each in expected]}")
    one, other = (np.concatenate([np.array(each, np.float64) for each in side]) for side in (found, expected))
    if not np.array_equal(np.isnan(one), np.isnan(other)):
        raise WrongAnswerError(f"no logprob at {np.flatnonzero(np.isnan(one))}")
    return float(np.nanmax(np.abs(one - other), initial=0))


def draw_prompts(passages: Sequence[Passage], rng: random.Random) -> tuple[list[Any], list[np.ndarray]]:
    """Texts or token ids, and the logprobs of each."""
    chosen = rng.sample(passages, rng.choice((1, 1, 2, 4)))
    prompts = [passage.text for passage in chosen] if rng.random() < 0.5 else [each.token_ids for each in chosen]
    return prompts, [passage.logprobs for passage in chosen]


def draw_continuations(passages: Sequence[Passage], rng: random.Random) -> tuple[list[Any], list[np.ndarray]]:
    """The beginning of a passage and two continuations, the rest and a part of the rest; and the logprobs of both."""
    passage = rng.choice(passages)
    split = rng.randrange(1, len(passage.token_ids))
    end = rng.randrange(split, len(passage.token_ids)) + 1
    continuations = [passage.token_ids[split:], passage.token_ids[split:end]]
    return [passage.token_ids[:split], continuations], [passage.logprobs[split:], passage.logprobs[split:end]]


async def score(client: AsyncScoreClient, passages: Sequence[Passage], rng: random.Random) -> float:
    """The largest difference of an answer of `/v1/score` from the oracle, in nats; so do the next two."""
    if rng.random() < 0.6:
        prompts, expected = draw_prompts(passages, rng)
        prompt = [prompts]
    else:
        prompt, expected = draw_continuations(passages, rng)
    scores = await client.score(
        *prompt,
        top_logprobs=rng.choice((0, 0, 1, 5, 20)),
        return_ranks=rng.random() < 0.3,
        return_tokens=rng.random() < 0.3,
        use_cache=rng.random() < 0.8,
    )
    return largest_difference([each.logprobs for each in scores], expected)


async def echo(client: AsyncScoreClient, passages: Sequence[Passage], rng: random.Random) -> float:
    prompts, expected = draw_prompts(passages, rng)
    generated = rng.choice((0, 1))
    body = {"prompt": prompts, "echo": True, "logprobs": rng.choice((0, 1, 5)), "max_tokens": generated}
    async with httpx.AsyncClient(base_url=client.base_url, timeout=ANSWER_SECONDS) as http:
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    found = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    return largest_difference([each[: len(each) - generated] for each in found], expected)


async def perplexity(client: AsyncScoreClient, passages: Sequence[Passage], rng: random.Random) -> float:
    passage, windows = rng.choice(passages), list[PerplexityWindow]()
    await client.perplexity(passage.token_ids, on_window=windows.append, **WINDOWS)
    if [window.num_scored for window in windows] != [scored for scored, _ in passage.window_nlls]:
        raise WrongAnswerError(f"windows of {[window.num_scored for window in windows]} tokens")
    pairs = zip(windows, passage.window_nlls, strict=True)
    return max(abs(window.nll_sum - nll) / scored for window, (scored, nll) in pairs)


REQUESTS = (score, score, echo, perplexity)


@dataclass(slots=True)
class Tally:
    """Counts of the outcomes of one kind of requests."""

    right: int = 0
    dropped: int = 0
    failures: list[str] = field(default_factory=list)
    largest_difference: float = 0.0


async def put_load(url: str, passages: Sequence[Passage], clients: int, seconds: float) -> dict[str, Tally]:
    """Each client sends one request after another until the time is up, and gets its last answer."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    end, last_seconds = time.monotonic() + seconds, 1.0
    async with AsyncScoreClient(url, timeout=ANSWER_SECONDS, max_retries=0) as client:

        async def run_client(rng: random.Random) -> None:
            nonlocal last_seconds
            while time.monotonic() < end:
                request, start = rng.choice(REQUESTS), time.monotonic()
                patience = rng.uniform(0, last_seconds) if rng.random() < DROPPED_SHARE else None
                tally = tallies[request.__name__]
                try:
                    async with asyncio.timeout(patience):
                        difference = await request(client, passages, rng)
                    if difference > oracle.PER_TOKEN:
                        raise WrongAnswerError(f"{difference:.2g} nats from the oracle")
                except TimeoutError:
                    tally.dropped += 1
                except (ScoremodeError, httpx.HTTPError, WrongAnswerError, LookupError, ValueError) as error:
                    tally.failures.append(f"{request.__name__}: {error!r:.500}")
                else:
                    last_seconds = time.monotonic() - start
                    tally.right += 1
                    tally.largest_difference = max(tally.largest_difference, difference)

        await asyncio.gather(*(run_client(random.Random(f"{seconds} {number}")) for number in range(clients)))
    return tallies


def fill_caches(url: str) -> None:
    """Score enough fresh prompts to fill both caches, then one of each length up to `BATCH_SIZES`."""
    rng = random.Random(0)
    with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as client:
        vocab_size = client.get("/v1/score").json()["vocab_size"]
        for lengths in [*[[512] * 8] * FILLING_REQUESTS, *([length + 1] for length in range(1, BATCH_SIZES + 1))]:
            prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
            body = {"prompt": prompts, "top_logprobs": 20, "use_cache": len(lengths) > 1}
            client.post("/v1/score", json=body).raise_for_status()
    if not metric(url, f"scoremode_score_cache_evictions_total{LABELS}"):
        raise RuntimeError("the row cache is not full")


async def until_idle(url: str) -> list[str]:
    """Wait until nothing runs or waits; else what still does after `IDLE_SECONDS`."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        busy = [f"{name} is {value:g}" for name in IDLE_GAUGES if (value := metric(url, name + LABELS))]
        if not busy or time.monotonic() > end:
            return busy
        await asyncio.sleep(0.5)


async def soak(server: ServerProcess, passages: Sequence[Passage], options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, put the load on, wait until the server is idle, and look at what is left."""
    await asyncio.to_thread(fill_caches, server.url)
    seconds = 60 * options.minutes
    warm_up = max(LEAST_WARM_UP_SECONDS, WARM_UP_SHARE * seconds)
    warmed = await put_load(server.url, passages, options.clients, warm_up)
    problems = await until_idle(server.url)
    before = usage(server.pid)
    print("  warm", flush=True)
    samples: list[dict[int, Usage]] = []
    sampling = asyncio.create_task(sample_usage(server.pid, samples))
    tallies = await put_load(server.url, passages, options.clients, seconds)
    sampling.cancel()
    problems += [failure for tally in (*warmed.values(), *tallies.values()) for failure in tally.failures]
    problems += [f"{kind}: {tally}" for kind, tally in tallies.items() if not tally.right or not tally.dropped]
    problems += [*await until_idle(server.url), *left_over(before, usage(server.pid), options.clients)]
    grown = [(name, first, last, last / first - 1) for name, first, last in growths(samples)]
    problems += [f"{name} grew by {share:.2%}" for name, _, _, share in grown if share > options.growth]
    answers = [
        (kind, str(each.right), str(each.dropped), str(len(each.failures)), f"{each.largest_difference:.1e}")
        for kind, each in sorted(tallies.items())
    ]
    memory = [(name, f"{first:,.1f}", f"{last:,.1f}", f"{share:+.2%}") for name, first, last, share in grown]
    print(table(ANSWERS_HEADER, answers), table(MEMORY_HEADER, memory), sep="\n\n")
    return {"answers": tallies, "samples": samples, "problems": problems}


def main() -> None:
    """Compute what is right, start the server, soak it, print the tables."""
    parser = benchmark_parser(__doc__, model=Path, logs=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--passages", type=int, default=96)
    parser.add_argument("--growth", type=float, default=0.03, help="share of its memory that a process may grow by")
    options, flags = parsed(parser)
    passages = make_passages(options.model, options.passages, random.Random(0))
    print(f"{len(passages)} passages, {sum(len(passage.token_ids) for passage in passages):,} tokens", flush=True)
    log = options.logs / "soak.log"
    with server_process(options.model, *FLAGS, *flags, log=log) as server:
        found = asyncio.run(soak(server, passages, options))
        # vLLM may log one when it is stopped.
        tracebacks = log.read_text(errors="replace").count("Traceback (most recent call last)")
    found["problems"] += [f"{tracebacks} tracebacks in {log}"] * bool(tracebacks)
    (options.logs / "soak.json").write_text(json.dumps(found | {"arguments": sys.argv[1:]}, indent=1, default=asdict))
    print("\n".join(found["problems"][:20]) or "Nothing wrong, nothing left over.")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
