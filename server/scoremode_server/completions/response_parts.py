"""Responses that are too large to be written at once: a gap in JSON for each large part, filled in while it is sent."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from copy import copy
from typing import Any

import orjson
from vllm.outputs import RequestOutput

from scoremode_server.prefix_cache.engine import EngineResult
from scoremode_server.scoring.turns import WRITTEN_AT_ONCE, Turns

HELD_SECONDS = 0.005
"""After so long, a larger response lets the event loop do something else."""

Body = bytes | AsyncIterator[bytes]
"""Of a response: JSON at once, or if it is large in parts, each written when it is asked for."""

_GAP = b"\0"
"""A byte that JSON never has: in texts it is escaped."""

GAP = orjson.Fragment(_GAP)


def without_rows(result: EngineResult, prompt: str | None = None) -> RequestOutput:
    """What vLLM's response builder is shown of a result: all but the prompt's logprobs, and the prompt's text."""
    output = copy(result.output)
    output.prompt = prompt if output.prompt is None else output.prompt
    output.prompt_logprobs = None
    output.num_cached_tokens = result.num_cached_tokens
    return output


def filled(content: dict[str, Any], fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of `content` with one of the fillings, each in parts, for each `GAP` in it."""
    between = iter(orjson.dumps(content).split(_GAP))
    yield next(between)
    for filling in fillings:
        yield from filling
        yield next(between)


def as_body(parts: Iterable[bytes], num_logprobs: int, turns: Turns) -> Body:
    """A response of so many logprobs from its parts."""
    return b"".join(parts) if num_logprobs <= WRITTEN_AT_ONCE else in_turns(parts, turns)


async def in_turns(parts: Iterable[bytes], turns: Turns) -> AsyncIterator[bytes]:
    """Parts that are written as they are asked for, several small ones as one; others have their turns between them."""
    waiting: list[bytes] = []
    await turns.take()
    began = time.monotonic()
    for part in parts:
        waiting.append(part)
        if time.monotonic() - began > HELD_SECONDS:
            if together := b"".join(waiting):
                yield together
            waiting.clear()
            await turns.take()
            began = time.monotonic()
    yield b"".join(waiting)
