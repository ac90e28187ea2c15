"""JSON written fast: numpy arrays go to the wire without a Python object per token. And an answer to nobody."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import orjson
from fastapi import Response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation


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


def until_disconnect(
    handle: Callable[..., Coroutine[Any, Any, Response]],
) -> Callable[..., Coroutine[Any, Any, Response]]:
    """Cancel a handler when its client disconnects. vLLM's decorator then returns None, which is no response and would
    be logged as an error of the server."""
    cancellable = with_cancellation(handle)

    @wraps(handle)
    async def handle_until_disconnect(*args: Any, **kwargs: Any) -> Response:
        response: Response | None = await cancellable(*args, **kwargs)
        return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response

    return handle_until_disconnect


CLIENT_CLOSED_REQUEST = 499
"""nginx's name and number for it; seen in logs and metrics only."""
