"""How the body of a request gets in: its bytes within a limit, and from them the model that a route works on."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from scoremode.protocol import KldRequest, PerplexityRequest, ReferenceRequest, ScoreRequest, TokensRequest
from scoremode_server.api.requests import scoremode_state
from scoremode_server.errors import EncodingError, RequestError, TooLargeError
from scoremode_server.json_fields import (
    CANDIDATES,
    CONTINUATIONS,
    ONE_PROMPT,
    POSITIONS,
    PROMPTS,
    TEXTS,
    TOKENS,
    read_anything,
    read_list,
    read_scalar,
    split,
    stand_in,
)

T = TypeVar("T")

READ_AT_ONCE = 256 * 1024
"""Bytes of a body that are read on the event loop, in a few milliseconds. More are read in a thread, where one field at
a time holds the interpreter."""

_LISTS: dict[type[BaseModel], dict[str, Any]] = {
    ScoreRequest: {
        "prompt": PROMPTS,
        "continuations": CONTINUATIONS,
        "candidate_token_ids": CANDIDATES,
        "logprobs_from": POSITIONS,
    },
    PerplexityRequest: {"prompt": ONE_PROMPT, "texts": TEXTS},
    ReferenceRequest: {"prompt": ONE_PROMPT, "texts": TEXTS},
    KldRequest: {},
    TokensRequest: {"token_ids": TOKENS},
}
"""Fields of each request that may be large, and the forms that they may have. All others hold one value."""

_OBJECTS = {"corpus"}
"""Other fields of requests with lists that hold more than one value."""

MAX_REPORTED = 5
"""Faults of a body that are told the client at once."""


async def read_request(request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of a request's body.

    Raises:
        RequestValidationError: the body is not said to be JSON.
        RequestError: the body is too large, encoded, or cut off, or the server stops; or what `read` raises.
    """
    await validate_json_request(request)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise EncodingError(f"Content-Encoding {encoding} is not supported: send the body as it is", None)
    state = scoremode_state(request)
    with state.admission.until_stopped():
        body = await _read_body(request, state.limits.max_request_bytes)
        return read(body) if len(body) <= READ_AT_ONCE else await asyncio.to_thread(read, body)


async def _read_body(request: Request, limit: int) -> bytes:
    # vLLM's HTTP server has checked that the length is a number.
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


def read_model(model: type[BaseModel], body: bytes) -> BaseModel:
    """A request of `/v1/score` or `/v1/perplexity`.

    Pydantic, which would try each form of a list on each of its values, validates the fields with a small list in the
    place of one that has been read already.

    Raises:
        RequestError: the body is no JSON object, or a list in it has a wrong value.
        ValidationError: a field is missing, unknown or wrong.
    """
    forms = _LISTS[model]
    lists, to_validate, unknown = {}, {}, []
    for name, raw in split(body).items():
        if name in forms:
            lists[name] = read_list(raw, name, forms[name])
            to_validate[name] = stand_in(lists[name])
        elif name in model.model_fields:
            is_scalar = forms and name not in _OBJECTS
            to_validate[name] = read_scalar(raw, name) if is_scalar else read_anything(raw, name)
        else:
            unknown.append(name)
    request = model.model_validate({**to_validate, **dict.fromkeys(unknown[:MAX_REPORTED])})
    for name, value in lists.items():
        setattr(request, name, value)
    return request


class ReadRequest(Request):
    """A request as FastAPI gets it after its body has been read: the model comes in the place of parsed JSON.

    FastAPI hands an object of the right model to the route as it is.
    """

    def __init__(self, request: Request, model: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        """Not empty, which is all that FastAPI asks of it."""
        return b"{}"

    async def json(self) -> BaseModel:
        """The model."""
        return self._model
