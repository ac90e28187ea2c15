"""Bodies of requests: bytes within a limit, and the models that routes make of them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from scoremode.wire.protocol import PerplexityRequest, ScoreRequest, TokensRequest
from scoremode.wire.references import ReferenceRequest
from scoremode_server import json_fields
from scoremode_server.api.requests import scoremode_state
from scoremode_server.completions.requests import read_completion_request, read_generate_request
from scoremode_server.errors import EncodingError, RequestError, TooLargeError

T = TypeVar("T")

READ_AT_ONCE = 256 * 1024
"""Bytes of a body that are decoded on the event loop, in a few milliseconds. Longer ones are decoded in a thread."""

_TEXTS = {"prompt": json_fields.ONE_PROMPT, "texts": json_fields.TEXTS}
_LISTS: dict[type[BaseModel], dict[str, Any]] = {
    ScoreRequest: {
        "prompt": json_fields.PROMPTS,
        "continuations": json_fields.CONTINUATIONS,
        "candidate_token_ids": json_fields.CANDIDATES,
        "logprobs_from": json_fields.TOKENS,
    },
    PerplexityRequest: _TEXTS,
    ReferenceRequest: _TEXTS,
    TokensRequest: {"token_ids": json_fields.TOKENS},
}
"""Fields of each request that may be large, and their allowed forms."""

MAX_REPORTED = 5
"""Faults of a body that one error names."""


async def read_request(request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of a request's body."""
    await validate_json_request(request)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise EncodingError(f"Content-Encoding {encoding} is not supported: send the body as it is", None)
    state = scoremode_state(request)
    with state.admission.until_stopped():
        body = await _read_body(request, state.limits.max_request_bytes)
        return read(body) if len(body) <= READ_AT_ONCE else await asyncio.to_thread(read, body)


async def _read_body(request: Request, limit: int) -> bytes:
    # uvicorn has checked that the length is a number.
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise RequestError("the client disconnected before it had sent the body", None) from None
    return b"".join(chunks)


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the body has more than {limit} bytes, which is this server's --max-request-bytes", None)


def reader_of(model: type[BaseModel]) -> Callable[[bytes], BaseModel]:
    """The function that makes a request of this model from a body."""
    readers: dict[type[BaseModel], Callable[[bytes], BaseModel]] = {
        CompletionRequest: read_completion_request,
        GenerateRequest: read_generate_request,
    }
    return readers.get(model) or partial(_read_model, model)


def _read_model(model: type[BaseModel], body: bytes) -> BaseModel:
    """A request of Scoremode's own routes. Pydantic tries each form of a list on each of its values, so it validates a
    short list in place of one that is decoded already.

    Raises:
        ValidationError: a field is missing, unknown or wrong.
    """
    forms = _LISTS.get(model, {})
    lists, to_validate, unknown = {}, {}, []
    fields, repeated = json_fields.split(body)
    json_fields.check_names({}, repeated)
    for name, raw in fields.items():
        if name in forms:
            lists[name] = json_fields.read_list(raw, name, forms[name])
            to_validate[name] = json_fields.stand_in(lists[name])
        elif name in model.model_fields:
            to_validate[name] = json_fields.read_anything(raw, name)
        else:
            unknown.append(name)
    json_fields.check_names({name: fields[name] for name in to_validate if name not in lists})
    request = model.model_validate({**to_validate, **dict.fromkeys(unknown[:MAX_REPORTED])})
    for name, value in lists.items():
        setattr(request, name, value)
    return request
