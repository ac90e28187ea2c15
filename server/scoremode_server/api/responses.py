"""JSON written fast, where numpy arrays go to the wire without a Python object per token."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse


def json_response(content: Any) -> Response:
    """A response of plain objects and contiguous numpy arrays; NaN becomes null."""
    return Response(dump(content), media_type="application/json")


def written_response(body: bytes | AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON that is written, or is while it is sent."""
    if isinstance(body, bytes):
        return Response(body, headers=headers, media_type="application/json")
    return StreamingResponse(body, headers=headers, media_type="application/json")


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
