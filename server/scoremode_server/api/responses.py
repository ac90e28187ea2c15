"""JSON written fast: numpy arrays go to the wire without a Python object per token."""

from typing import Any

import orjson
from fastapi.responses import JSONResponse


class ArrayJSONResponse(JSONResponse):
    """A JSON response whose content may hold numpy arrays; NaN becomes null."""

    def render(self, content: Any) -> bytes:
        return dump(content)


class WrittenJSONResponse(JSONResponse):
    """A JSON response whose content is JSON already."""

    def render(self, content: bytes) -> bytes:
        return content


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(content) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
