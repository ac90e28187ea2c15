"""JSON written fast, where numpy arrays go to the wire without a Python object per token, whole or as events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Send


def json_response(content: Any) -> Response:
    """A response of plain objects and contiguous numpy arrays; NaN becomes null."""
    return Response(dump(content), media_type="application/json")


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(content) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events. If the client leaves, or the server ends, before the last one, the generator of
    events is closed at once; Starlette leaves that to the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._events):
            await super().stream_response(send)
