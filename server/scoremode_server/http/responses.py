"""Responses of JSON, written from numpy arrays without a Python object per token: one, or a stream of server-sent
events."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from scoremode_server.engine.admission import Admission, RequestQueue, cancel_and_wait
from scoremode_server.errors import BusyError, RequestError
from scoremode_server.http.requests import WHEN_SENT, accept, error_content, logger
from scoremode_server.rows import json_logprobs

T = TypeVar("T")

ANSWER_BYTES = 2**30
"""Large answers of this process, from before they are computed until their clients have taken them; a larger one may be
alone. The largest takes half of this."""

LARGE_BYTES = 2**18
"""Answers that are not larger do not count: a connection may hold a longer body."""

VALUE_BYTES = {"base64": 8, "float": 64}
"""What a logprob and its token id take in an answer, by encoding."""

SECONDS_TO_WAIT = 300
"""The time that a request waits for space for its answer: half of the time after which a client gives up."""

PART_BYTES = 2**20
"""The server's connection holds two such parts of an answer that its client has not taken."""

Events = Callable[[RequestQueue], AsyncGenerator[dict[str, Any], None]]
"""The windows of a request, then its result."""


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: Any) -> Response:
    body = dump(content)
    if len(body) <= PART_BYTES:
        return Response(body, media_type="application/json")
    # The response ends when the client has taken the last part. One part would be with the connection then, in whole.
    headers = {"Content-Length": str(len(body))}
    return StreamingResponse(_in_parts(body), headers=headers, media_type="application/json")


async def _in_parts(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


class AnswerSpace:
    """Bounds the bytes of large answers. Requests wait for each other in turn before the engine computes anything for
    them, and clients that read slowly keep their answer's space."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._line, self._freed = asyncio.Lock(), asyncio.Event()

    async def reserve(self, request: Request, num_values: int, encoding_format: str = "base64") -> None:
        """Wait until there is space for an answer of so many logprobs, and hold it until the answer is sent. BusyError
        if there is none in time."""
        num_bytes = num_values * VALUE_BYTES[encoding_format]
        if num_bytes <= LARGE_BYTES:
            return
        try:
            async with asyncio.timeout(SECONDS_TO_WAIT), self._line:
                while self.num_bytes and self.num_bytes + num_bytes > ANSWER_BYTES:
                    self._freed.clear()
                    await self._freed.wait()
                self.num_bytes += num_bytes
                request.scope[WHEN_SENT] = partial(self._free, num_bytes)
        except TimeoutError:
            raise BusyError(
                f"answers to other clients take {self.num_bytes} of {ANSWER_BYTES} bytes, and this one would take "
                f"{num_bytes}: try again later, or request fewer top tokens at once",
                None,
            ) from None

    def _free(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._freed.set()


def top_entries(
    token_ids: np.ndarray, logprobs: np.ndarray, texts_of: Callable[[Sequence[int]], list[str]] | None = None
) -> list[list[dict[str, Any]]]:
    """The top tokens [n, k] at each position, each as a `TopLogprob`, with texts if wanted."""
    entries = [
        [{"token_id": token_id, "logprob": logprob} for token_id, logprob in zip(*row, strict=True)]
        for row in zip(token_ids.tolist(), json_logprobs(logprobs).tolist(), strict=True)
    ]
    if texts_of is not None:
        for row in entries:
            for entry, text in zip(row, texts_of([entry["token_id"] for entry in row]), strict=True):
                entry["token"] = text
    return entries


async def respond(
    admission: Admission, route: str, request_id: str, events: Events, *, stream: bool, with_windows: bool = False
) -> Response:
    """Accept a request, whose sequences count when they begin. Answer with a stream of all events, or with the result
    alone, with the windows in `data` if wanted."""
    in_queue = accept(admission, route, request_id)
    if stream:
        return ClosingStream(_event_stream(in_queue, events, request_id), media_type="text/event-stream")
    results: deque[dict[str, Any]] = deque(maxlen=None if with_windows else 1)
    async with in_queue as queue, aclosing(events(queue)) as all_events:
        async for event in all_events:
            results.append(event)
        result = results.pop()
        if with_windows:
            result["data"] = sorted(results, key=itemgetter("index"))
        return json_response(result)


class ClosingStream(StreamingResponse):
    """Content that ends when the client leaves, after a `beginning` that was taken from it."""

    def __init__(self, content: AsyncGenerator[Any, None], beginning: Any = None, **options: Any) -> None:
        self._content = content
        super().__init__(self._all(beginning), **options)

    async def _all(self, beginning: Any) -> AsyncGenerator[Any, None]:
        if beginning is not None:
            yield beginning
        async for part in self._content:
            yield part

    async def stream_response(self, send: Send) -> None:
        """Send all; Starlette would leave the end of the generator to the garbage collector."""
        async with aclosing(self._content):
            await super().stream_response(send)


async def in_own_task(
    in_queue: AbstractAsyncContextManager[RequestQueue], parts: Callable[[RequestQueue], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """The parts of the answer to a request that is accepted. A task of its own owns the request, whose time may run
    out while the client reads. If the reader stops, the request ends at once."""
    made: asyncio.Queue[T | None] = asyncio.Queue()

    async def own() -> None:
        async with in_queue as queue, aclosing(parts(queue)) as all_parts:
            async for part in all_parts:
                made.put_nowait(part)
                # Until the client reads on.
                await made.join()

    owner = asyncio.create_task(own())
    owner.add_done_callback(lambda _: made.put_nowait(None))
    try:
        while (part := await made.get()) is not None:
            yield part
            made.task_done()
        await owner
    finally:
        await cancel_and_wait(owner)


async def _event_stream(
    in_queue: AbstractAsyncContextManager[RequestQueue], events: Events, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events as JSON, and `[DONE]` at the end. An error is an event, because the status line was sent before."""
    try:
        async with aclosing(in_own_task(in_queue, events)) as all_events:
            async for event in all_events:
                yield b"data: %b\n\n" % dump(event)
    except Exception as error:
        if not isinstance(error, RequestError):
            logger.exception("Request %s failed", request_id)
        yield b"data: %b\n\n" % dump(error_content(error))
    yield b"data: [DONE]\n\n"
