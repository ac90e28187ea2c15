"""Responses of server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send
from vllm.logger import init_logger

from scoremode_server.api.disconnects import cancel_and_wait
from scoremode_server.api.error_responses import error_content
from scoremode_server.api.responses import dump
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.admission import RequestQueue

# vLLM writes what comes below its own name.
logger = init_logger("vllm.scoremode.api")


Contents = Callable[[RequestQueue], AsyncGenerator[Any, None]]


class EventStream(StreamingResponse):
    """An event for each of the `contents` of a request that is `accepted`, which become JSON, and `[DONE]` at the end.

    An error is sent as an event, because the status line went before; one that is not the request's is logged too. A
    task of its own owns the request: its time may run out while the client reads. If the client leaves, or the server
    ends, before the last event, the request ends at once; Starlette leaves that to the garbage collector.
    """

    def __init__(
        self, accepted: AbstractAsyncContextManager[RequestQueue], contents: Contents, request_id: str
    ) -> None:
        self._events = _events(accepted, contents, request_id)
        super().__init__(self._events, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def _events(
    accepted: AbstractAsyncContextManager[RequestQueue], contents: Contents, request_id: str
) -> AsyncGenerator[bytes, None]:
    events: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def own() -> None:
        try:
            async with accepted as queue, aclosing(contents(queue)) as parts:
                async for part in parts:
                    events.put_nowait(_event(part))
                    # Until the client comes for more.
                    await events.join()
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("Request %s failed", request_id)
            events.put_nowait(_event(error_content(error)))

    owner = asyncio.create_task(own())
    owner.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while event := await events.get():
            yield event
            events.task_done()
        await owner
        yield b"data: [DONE]\n\n"
    finally:
        await cancel_and_wait(owner)


def _event(content: Any) -> bytes:
    return b"data: " + dump(content) + b"\n\n"
