"""JSON written fast: numpy arrays go to the wire without a Python object per token."""

from typing import Any

import numpy as np
import orjson
from fastapi.responses import JSONResponse

from scoremode.protocol import LOWEST_LOGPROB


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


def json_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """float32 logprobs as the float64 that JSON readers get, exactly; minus infinity as `LOWEST_LOGPROB`.

    Written as float32, a logprob would have fewer digits, but read back as float64 it would be another number.
    """
    return np.maximum(logprobs.astype(np.float64), LOWEST_LOGPROB)
