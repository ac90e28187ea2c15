"""Responses of routes that report windows: a stream of server-sent events, or its last event alone."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from operator import itemgetter
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Send
from vllm.logger import init_logger

from scoremode_server.api.disconnects import cancel_and_wait
from scoremode_server.api.error_responses import ERROR_RESPONSES, error_content
from scoremode_server.api.requests import accepted
from scoremode_server.api.responses import dump, json_response
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.admission import Admission, RequestQueue

# vLLM prints what loggers below its own write.
logger = init_logger("vllm.scoremode.api")

Events = Callable[[RequestQueue], AsyncGenerator[dict[str, Any], None]]
"""The windows of a request, then its result."""

EVENT_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, **ERROR_RESPONSES}


async def respond(
    admission: Admission, route: str, request_id: str, events: Events, *, stream: bool, with_windows: bool = False
) -> Response:
    """Accept a request, whose sequences count when they begin. Answer with a stream of all events, or with the result
    alone, with the windows in `data` if wanted."""
    in_queue = accepted(admission, route, request_id)
    if stream:
        return EventStream(in_queue, events, request_id)
    kept: deque[dict[str, Any]] = deque(maxlen=None if with_windows else 1)
    async with in_queue as queue, aclosing(events(queue)) as all_events:
        async for event in all_events:
            kept.append(event)
        result = kept.pop()
        if with_windows:
            result["data"] = sorted(kept, key=itemgetter("index"))
        return json_response(result)


class EventStream(StreamingResponse):
    """The events of a request that is `accepted`, as JSON, and `[DONE]` at the end.

    An error is an event, because the status line was sent before. A task of its own owns the request, whose time may
    run out while the client reads. If the client leaves or the server stops, the request ends at once.
    """

    def __init__(self, in_queue: AbstractAsyncContextManager[RequestQueue], events: Events, request_id: str) -> None:
        self._events = _written(in_queue, events, request_id)
        super().__init__(self._events, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        """Send all events; Starlette would leave the end of `_events` to the garbage collector."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def _written(
    in_queue: AbstractAsyncContextManager[RequestQueue], events: Events, request_id: str
) -> AsyncGenerator[bytes, None]:
    written: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def own() -> None:
        try:
            async with in_queue as queue, aclosing(events(queue)) as all_events:
                async for event in all_events:
                    written.put_nowait(_event(event))
                    # Until the client reads on.
                    await written.join()
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("Request %s failed", request_id)
            written.put_nowait(_event(error_content(error)))

    owner = asyncio.create_task(own())
    owner.add_done_callback(lambda _: written.put_nowait(None))
    try:
        while event := await written.get():
            yield event
            written.task_done()
        await owner
        yield b"data: [DONE]\n\n"
    finally:
        await cancel_and_wait(owner)


def _event(content: Any) -> bytes:
    return b"data: " + dump(content) + b"\n\n"
