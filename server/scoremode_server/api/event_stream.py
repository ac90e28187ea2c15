"""Responses of server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send
from vllm.logger import init_logger

from scoremode_server.api.error_responses import error_content
from scoremode_server.api.responses import dump
from scoremode_server.errors import RequestError

# vLLM writes what comes below its own name.
logger = init_logger("vllm.scoremode.api")


class EventStream(StreamingResponse):
    """An event for each of `contents`, which become JSON, and `[DONE]` at the end.

    An error is sent as an event, because the status line went before; one that is not the request's is logged too. If
    the client leaves, or the server ends, before the last event, `contents` is closed at once; Starlette leaves that to
    the garbage collector.
    """

    def __init__(self, contents: AsyncGenerator[Any, None], request_id: str) -> None:
        self._events = _events(contents, request_id)
        super().__init__(self._events, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def _events(contents: AsyncGenerator[Any, None], request_id: str) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(contents):
            async for content in contents:
                yield _event(content)
    except Exception as error:
        if not isinstance(error, RequestError):
            logger.exception("Request %s failed", request_id)
        yield _event(error_content(error))
    yield b"data: [DONE]\n\n"


def _event(content: Any) -> bytes:
    return b"data: " + dump(content) + b"\n\n"
