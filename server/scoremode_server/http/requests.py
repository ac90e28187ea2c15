"""Reads the bodies of requests, cancels a request when its client leaves, logs how it ended, and answers errors in
OpenAI's shape, for all routes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from http import HTTPStatus
from typing import Any, ClassVar, cast

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect, load_aware_call, validate_json_request
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode.windows import WindowError
from scoremode_server import errors
from scoremode_server.engine.admission import Admission, RequestQueue, cancel_and_wait
from scoremode_server.http.json_fields import read_fields

# vLLM prints the messages of loggers below its own.
logger = init_logger("vllm.scoremode")

RouteHandler = Callable[..., Coroutine[Any, Any, Response]]

STATUSES: dict[type[BaseException], HTTPStatus] = {
    errors.RequestError: HTTPStatus.BAD_REQUEST,
    errors.NotServedError: HTTPStatus.NOT_FOUND,
    errors.ConflictError: HTTPStatus.CONFLICT,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.EncodingError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.BusyError: HTTPStatus.TOO_MANY_REQUESTS,
    errors.UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OverdueError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.StorageError: HTTPStatus.INSUFFICIENT_STORAGE,
}
"""The HTTP status of each error. Packages in layers below `http` know no statuses."""

CLIENT_CLOSED_REQUEST = 499
"""The status, in logs and metrics, of a request whose client left."""

WHEN_SENT = "scoremode.when_sent"
"""The key in a request's ASGI scope for a function to call once the answer was sent, or can no longer be sent."""

READ_AT_ONCE = 256 * 1024
"""Bytes of a body that are decoded on the event loop, in a few milliseconds. Longer ones are decoded in a thread."""

MAX_REPORTED = 5
"""Limit on the faults of a body that one error names."""

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is at fault; `param` names the field."},
    404: {"model": ErrorResponse, "description": "No such model."},
    "4XX": {"model": ErrorResponse, "description": "Any other error of the request's, such as a missing API key."},
}
EVENT_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class ScoremodeRoute(APIRoute):
    """A route that answers invalid bodies and errors in `STATUSES` in OpenAI's shape; other errors go to vLLM's
    handlers. It reads bodies without FastAPI, which would go through all values again."""

    read_as: ClassVar[Mapping[Any, type[BaseModel] | None]] = {}
    """Maps a model that an endpoint names to the model that reads its bodies instead; None leaves reading to
    FastAPI."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        finally:
            if WHEN_SENT in scope:
                scope[WHEN_SENT]()

    def get_route_handler(self) -> RouteHandler:
        handle = super().get_route_handler()
        named: Any = None if self.body_field is None else self.body_field.field_info.annotation
        model = self.read_as.get(named, named)
        if model is not None:

            async def handle(request: Request) -> Response:
                body = await _read_request(request, model)
                return cast(Response, await self.endpoint(request=body, raw_request=request))

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                if named is not None and model is None:
                    raise
                # vLLM's check of the content type raises this.
                failure = errors.RequestError("; ".join(map(str, error.errors())), None)
            except ValidationError as error:
                # The error's `param` is the first field at fault; its message has up to `MAX_REPORTED` faults.
                details = error.errors(include_url=False, include_input=False)[:MAX_REPORTED]
                # pydantic makes one error per type of a union; some have equal texts.
                failure = errors.RequestError("; ".join(dict.fromkeys(map(_describe, details))), _field(details[0]))
            except WindowError as error:
                failure = errors.RequestError(str(error), error.field)
            except EngineDeadError:
                failure = errors.engine_dead_error()
            except errors.RequestError as error:
                failure = error
            can_retry = isinstance(failure, errors.BusyError | errors.UnavailableError)
            headers = {"Retry-After": str(errors.RETRY_AFTER_SECONDS)} if can_retry else None
            return JSONResponse(error_content(failure), status_code=status_of(failure), headers=headers)

        return handle_with_errors


def until_disconnect(handler: RouteHandler) -> RouteHandler:
    """Count a handler in vLLM's load metric, limit its time to `--request-timeout`, and cancel it when the client
    leaves. Unlike vLLM's `with_cancellation`, this waits until the handler has ended, so no work outlives the
    answer."""
    counted = load_aware_call(handler)

    @wraps(handler)
    async def run(*, raw_request: Request, **arguments: Any) -> Response:
        raw_request.app.state.scoremode.admission.start_clock()
        handling = asyncio.create_task(counted(raw_request=raw_request, **arguments))
        leaving = asyncio.create_task(listen_for_disconnect(raw_request))
        try:
            await asyncio.wait((handling, leaving), return_when=asyncio.FIRST_COMPLETED)
            return handling.result() if handling.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            await cancel_and_wait(handling, leaving)

    return run


@asynccontextmanager
async def accept(
    admission: Admission, route: str, request_id: str, num_sequences: int = 0, num_tokens: int = 0
) -> AsyncGenerator[RequestQueue, None]:
    """Enter `Admission.request`, and log how the request ended."""
    queue, failure = None, None
    try:
        async with admission.request(num_sequences, num_tokens) as queue:
            yield queue
    except BaseException as error:
        failure = error
        raise
    finally:
        if queue is not None:
            now = time.monotonic()
            entered = now if queue.entered_at is None else queue.entered_at
            # Texts and tokens never get into the log.
            logger.info(
                "request id=%s route=%s status=%d sequences=%d tokens=%d cached=%d waited=%.3f ran=%.3f",
                # Quote the client's id, so that it cannot write other fields or lines.
                json.dumps(request_id),
                route,
                status_of(failure),
                queue.num_scored,
                queue.num_scored_tokens,
                queue.num_cached_tokens,
                entered - queue.accepted_at,
                now - entered,
            )


def status_of(error: BaseException | None) -> int:
    """The HTTP status of a request that ended with an error, or without one."""
    if error is None:
        return HTTPStatus.OK
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return CLIENT_CLOSED_REQUEST
    return STATUSES.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def error_content(error: Exception) -> dict[str, Any]:
    """Make `{"error": {"message", "type", "param", "code"}}`. vLLM sets these fields for errors other than
    RequestError."""
    if isinstance(error, errors.RequestError):
        status = STATUSES[type(error)]
        kind = f"{status.phrase.title().replace(' ', '')}Error"
        response = create_error_response(str(error), kind, status, error.param)
    else:
        response = create_error_response(error)
    return cast(dict[str, Any], response.model_dump())


_TYPES = ("str", "int", "float", "bool")


def _field(detail: Any) -> str | None:
    """The field that a pydantic error names; None if it concerns the whole body, such as fields that exclude each
    other."""
    return str(detail["loc"][0])[: errors.MAX_NAME] if detail["loc"] else None


def _describe(detail: Any) -> str:
    place = (_field(detail) or "the body") + "".join(map(_part, detail["loc"][1:]))
    if detail["type"] == "missing":
        return f"{'.'.join(map(str, detail['loc']))} is required"
    if detail["type"] == "extra_forbidden":
        return f"unknown field {place}"
    return f"{place}: {detail['msg'].removeprefix('Input ').removeprefix('Value error, ')}"


def _part(part: int | str) -> str:
    """Format a part of a pydantic error's location. A type only names a branch of a union, and becomes an empty
    text."""
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part[: errors.MAX_NAME]}" if part.isidentifier() and part not in _TYPES else ""


async def _read_request(request: Request, model: type[BaseModel]) -> BaseModel:
    await validate_json_request(request)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise errors.EncodingError(f"Content-Encoding {encoding} is not supported: send the body as it is", None)
    core: Any = request.app.state.scoremode
    async with core.admission.until_stopped():
        body = await _read_body(request, core.limits.max_request_bytes, getattr(model, "body_factor", 1))

        def read() -> BaseModel:
            return model.model_validate(read_fields(body))

        return read() if len(body) <= READ_AT_ONCE else await asyncio.to_thread(read)


async def _read_body(request: Request, max_request_bytes: int, factor: int) -> bytes:
    limit, times = factor * max_request_bytes, "" if factor == 1 else f"{factor} times "
    message = f"the body has more than {limit} bytes, which is {times}this server's --max-request-bytes"
    # uvicorn has checked that the length is a number.
    if int(request.headers.get("content-length", 0)) > limit:
        raise errors.TooLargeError(message, None)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise errors.TooLargeError(message, None)
    except ClientDisconnect:
        raise errors.RequestError("the client disconnected before it had sent the body", None) from None
    return bytes(body)
