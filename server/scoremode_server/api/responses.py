"""Responses of JSON, written from numpy arrays without a Python object per token."""

import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from scoremode_server.rows import json_logprobs
from scoremode_server.vllm_patches.served_models import shorten_name


def dump(content: Any) -> bytes:
    """JSON of plain objects and contiguous numpy arrays; NaN becomes null."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: Any) -> Response:
    return Response(dump(content), media_type="application/json")


def written_response(
    result: bytes | AsyncIterator[bytes] | ErrorResponse, model: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    """A response of JSON that is written already or while it is sent, or an error of vLLM's handler."""
    if isinstance(result, ErrorResponse):
        shorten_name(result, model)
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    if isinstance(result, bytes):
        return Response(result, headers=headers, media_type="application/json")
    return StreamingResponse(result, headers=headers, media_type="application/json")


def as_base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def top_arrays(token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The top tokens [n, k] at each position, as `TopLogprobArrays`."""
    return {
        "shape": list(token_ids.shape),
        "token_ids": as_base64(token_ids.astype("<i4")),
        "logprobs": as_base64(logprobs.astype("<f4")),
    }


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
