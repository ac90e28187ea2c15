"""Loads for a server of the OpenAI kind, vLLM's or ours, and the rate at which it works them off.

    python bench/load.py URL MODEL KIND [COUNT]

prefill  2,047 random tokens, one token generated          echo     the same with `echo` and `logprobs: 1`
score    the same through `/v1/score`, base64              choices  701 tokens: 600 shared by all, 100 by four, 1 own
unshared 256 random tokens, `echo` and `logprobs: 1`
top50    2,047 random tokens through `/v1/score` with the 50 likeliest, base64
trl      the same through `/v1/completions` with `prompt_logprobs: 100`, as TRL asks a teacher
64 requests are in flight. Every call draws new tokens, so that no prefix cache serves one load from another.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

IN_FLIGHT = 64
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill": ("/v1/completions", {"max_tokens": 1, "temperature": 0}),
    "echo": ("/v1/completions", {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}),
    "score": ("/v1/score", {"encoding_format": "base64"}),
    "unshared": ("/v1/completions", {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}),
    "top50": ("/v1/score", {"encoding_format": "base64", "top_logprobs": 50}),
    "trl": ("/v1/completions", {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 100}),
    "choices": ("/v1/completions", {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """What a load came to."""

    tokens: int
    requests: int
    seconds: float
    received_bytes: int
    failed: int

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens a second."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:,.0f} tok/s, {self.requests / self.seconds:,.1f} req/s, {self.seconds:.2f} s, "
            f"{self.received_bytes:,} bytes, {self.failed} failed"
        )


def prompts(kind: str, count: int, seed: int | str) -> list[list[int]]:
    """Token ids of every request, from a range that no special token is in."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [rng.randrange(300, 49000) for _ in range(length)]

    if kind != "choices":
        return [draw(256 if kind == "unshared" else 2047) for _ in range(count)]
    shared = draw(600)
    return [shared + question + draw(1) for question in (draw(100) for _ in range(count // 4)) for _ in range(4)]


async def run(url: str, model: str, kind: str, count: int, seed: int) -> Rate:
    """Send `count` requests of a kind."""
    return await send_all(url + KINDS[kind][0], bodies(model, kind, count, seed))


def bodies(model: str, kind: str, count: int, seed: int | str) -> list[dict[str, Any]]:
    """The bodies of `count` requests of a kind."""
    return [{"model": model, "prompt": prompt, **KINDS[kind][1]} for prompt in prompts(kind, count, seed)]


async def send_all(url: str, bodies: Sequence[dict[str, Any]]) -> Rate:
    """Post every body to one address, `IN_FLIGHT` at once."""
    places = asyncio.Semaphore(IN_FLIGHT)
    timeout, connector = aiohttp.ClientTimeout(total=900), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(body: dict[str, Any]) -> tuple[int, bool]:
            async with places, session.post(url, json=body) as response:
                return len(await response.read()), response.status != 200

        start = time.perf_counter()
        answers = await asyncio.gather(*map(send, bodies))
        seconds = time.perf_counter() - start
    received, failures = zip(*answers, strict=True)
    tokens = sum(len(body.get("prompt", ())) for body in bodies)
    return Rate(tokens, len(bodies), seconds, sum(received), sum(failures))


if __name__ == "__main__":
    url, model, kind, *rest = sys.argv[1:]
    print(kind, asyncio.run(run(url, model, kind, int(rest[0]) if rest else 96, time.time_ns())))
