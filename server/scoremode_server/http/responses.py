"""Writes JSON responses, single ones or streams of server-sent events, and limits the memory of large ones."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from scoremode.wire.arrays import encode_column
from scoremode_server.engine.admission import Admission, RequestQueue, cancel_and_wait
from scoremode_server.errors import BusyError, RequestError
from scoremode_server.http.requests import WHEN_SENT, accept, error_content, logger
from scoremode_server.rows import NO_TOKEN, Rows, json_logprobs

T = TypeVar("T")

ANSWER_BYTES = 2**30
"""Limit on this process's large answers, from before they are computed until clients have read them; one larger answer
is allowed if it is alone. Scores take at most half of this."""

LARGE_BYTES = 2**18
"""Answers up to this size do not count towards `ANSWER_BYTES`: the buffer of a connection may be larger."""

VALUE_BYTES = {"base64": 8, "float": 64}
"""Bytes of a logprob and its token id in an answer, by encoding."""

SECONDS_TO_WAIT = 300
"""The time that a request waits for space for its answer: half of the Python client's timeout."""

PART_BYTES = 2**20
"""The size of the parts of a large answer. The server's connection holds two parts that the client has not read."""

Events = Callable[[RequestQueue], AsyncGenerator[dict[str, Any], None]]
"""A function that yields a request's windows, and then its result."""


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: Any) -> Response:
    body = dump(content)
    if len(body) <= PART_BYTES:
        return Response(body, media_type="application/json")
    # A response in parts ends when the client has read most of it. A response in one part would end at once, while the
    # connection still holds the whole body.
    headers = {"Content-Length": str(len(body))}
    return StreamingResponse(_in_parts(body), headers=headers, media_type="application/json")


async def _in_parts(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


class AnswerSpace:
    """Limits the bytes of large answers. Requests wait in the order of arrival, before the engine computes anything for
    them. A client that reads slowly keeps its answer's space."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._line, self._freed = asyncio.Lock(), asyncio.Event()

    async def reserve(self, request: Request, num_values: int, encoding_format: str = "base64") -> None:
        """Wait until there is space for an answer of `num_values` logprobs, and hold it until the answer is sent.
        BusyError if there is no space within `SECONDS_TO_WAIT`."""
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


def padded(values: np.ndarray, num_without: int, missing: float = np.nan) -> np.ndarray:
    """Put `missing` before values [n, ...] for `num_without` positions without a row. The result is contiguous."""
    return np.concatenate([np.full((num_without, *values.shape[1:]), missing, values.dtype), values])


def columns_json(rows: Rows, names: Iterable[str], encoding_format: str, num_without: int = 0) -> dict[str, Any]:
    """Encode columns of rows, by name. The first `num_without` positions have no row: they get null, or in base64 NaN
    or `NO_TOKEN`. In JSON, infinite numbers become null."""
    encoded: dict[str, Any] = {}
    for name in names:
        values = rows.column(name)
        is_float = values.dtype == np.float32
        if encoding_format == "base64":
            encoded[name] = encode_column(padded(values, num_without, np.nan if is_float else NO_TOKEN))
        else:
            # Write float64, because the shortest digits of a float32 read back as another float64.
            numbers = values.astype(np.float64) if is_float else values
            encoded[name] = [*[None] * num_without, *numbers.tolist()]
    return encoded


def top_entries(
    token_ids: np.ndarray, logprobs: np.ndarray, texts_of: Callable[[Sequence[int]], list[str]] | None = None
) -> list[list[dict[str, Any]]]:
    """Make a `TopLogprob` for each of the top tokens [n, k], with its text if `texts_of` is given."""
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
    """Accept a request whose sequences are counted one by one, as each begins. Answer with a stream of all events, or
    with the result alone, which has the windows in `data` if `with_windows`."""
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
    """Streams what a generator yields, and closes the generator when the client leaves. A `beginning`, already read
    from the generator, is sent first."""

    def __init__(self, content: AsyncGenerator[Any, None], beginning: Any = None, **options: Any) -> None:
        self._content = content
        super().__init__(self._all(beginning), **options)

    async def _all(self, beginning: Any) -> AsyncGenerator[Any, None]:
        if beginning is not None:
            yield beginning
        async for part in self._content:
            yield part

    async def stream_response(self, send: Send) -> None:
        """Send all parts and close the generator, which Starlette would leave to the garbage collector."""
        async with aclosing(self._content):
            await super().stream_response(send)


async def in_own_task(
    in_queue: AbstractAsyncContextManager[RequestQueue], parts: Callable[[RequestQueue], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """Yield the parts of the answer to an accepted request. A separate task enters `in_queue`, so that a timeout can
    end the request while the client reads. If the reader stops, the request ends at once."""
    made: asyncio.Queue[T | None] = asyncio.Queue()

    async def own() -> None:
        async with in_queue as queue, aclosing(parts(queue)) as all_parts:
            async for part in all_parts:
                made.put_nowait(part)
                # Wait until the client has read this part.
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
    """Yield events as JSON, and `[DONE]` at the end. An error is an event too, because the status line was already
    sent."""
    try:
        async with aclosing(in_own_task(in_queue, events)) as all_events:
            async for event in all_events:
                yield b"data: %b\n\n" % dump(event)
    except Exception as error:
        if not isinstance(error, RequestError):
            logger.exception("Request %s failed", request_id)
        yield b"data: %b\n\n" % dump(error_content(error))
    yield b"data: [DONE]\n\n"
