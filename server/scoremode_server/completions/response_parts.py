"""Large responses: JSON with a gap for each large part, which is written while the response is sent."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from copy import copy
from typing import Any

import orjson
from vllm.outputs import RequestOutput

from scoremode_server.prefix_cache.engine import EngineResult
from scoremode_server.scoring.turns import WRITTEN_AT_ONCE, Turns

HELD_SECONDS = 0.005
"""After this time, writing lets other tasks run."""

Body = bytes | AsyncIterator[bytes]
"""JSON, of a large response in parts, each written when the reader asks for it."""

_GAP = b"\0"
"""A byte that JSON never has: in texts it is escaped."""

GAP = orjson.Fragment(_GAP)


def without_rows(result: EngineResult, prompt: str | None = None) -> RequestOutput:
    """The output that vLLM's response builder gets: with the prompt's text, without its logprobs."""
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
    """A response with `num_logprobs` logprobs from its parts."""
    return b"".join(parts) if num_logprobs <= WRITTEN_AT_ONCE else in_turns(parts, turns)


async def in_turns(parts: Iterable[bytes], turns: Turns) -> AsyncIterator[bytes]:
    """Parts, several small ones as one. Other tasks run between them."""
    waiting: list[bytes] = []
    await turns.wait()
    began = time.monotonic()
    for part in parts:
        waiting.append(part)
        if time.monotonic() - began > HELD_SECONDS:
            if joined := b"".join(waiting):
                yield joined
            waiting.clear()
            await turns.wait()
            began = time.monotonic()
    yield b"".join(waiting)
