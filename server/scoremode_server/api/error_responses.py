"""Errors as responses in OpenAI's shape, and the route class that answers with them."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.api.bodies import MAX_REPORTED, read_request, reader_of
from scoremode_server.api.statuses import STATUSES
from scoremode_server.errors import MAX_NAME, BusyError, RequestError, UnavailableError, engine_has_died

RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]

RETRY_AFTER_SECONDS = 2

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is at fault; `param` names the field."},
    404: {"model": ErrorResponse, "description": "No such model."},
    "4XX": {"model": ErrorResponse, "description": "Any other error of the request's, such as a missing API key."},
}
"""Of Scoremode's own routes, in the API's description."""

STOCK_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **{status: {"model": ErrorResponse} for status in (400, 404, 500)},
}
"""Of vLLM's routes."""


def error_content(error: Exception) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`. vLLM has the status of errors that are not a request's."""
    if isinstance(error, RequestError):
        status = STATUSES[type(error)]
        kind = f"{status.phrase.title().replace(' ', '')}Error"
        response = create_error_response(str(error), kind, status, error.param)
    else:
        response = create_error_response(error)
    content: dict[str, Any] = response.model_dump()
    return content


class ScoremodeRoute(APIRoute):
    """A route whose requests' errors have OpenAI's shape; all other errors go to vLLM's own handlers. Requests with a
    body do not pass through FastAPI, whose models would look at each value again."""

    def get_route_handler(self) -> RouteHandler:
        handle: RouteHandler
        if self.body_field is None:
            handle = super().get_route_handler()
        else:
            model: Any = self.body_field.field_info.annotation
            handle = partial(self._read_and_answer, reader_of(model))

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                # vLLM's check of the content type.
                failure: RequestError = RequestError("; ".join(map(str, error.errors())), None)
            except ValidationError as error:
                failure = from_validation(error)
            except EngineDeadError:
                failure = engine_has_died()
            except RequestError as error:
                failure = error
            can_retry = isinstance(failure, BusyError | UnavailableError)
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if can_retry else None
            return JSONResponse(error_content(failure), status_code=STATUSES[type(failure)], headers=headers)

        return handle_with_errors

    async def _read_and_answer(self, read: Callable[[bytes], BaseModel], request: Request) -> Response:
        response: Response = await self.endpoint(await read_request(request, read), request)
        return response


def from_validation(error: ValidationError) -> RequestError:
    """One error whose `param` is the first field at fault, and whose message explains all faults."""
    details = error.errors(include_url=False, include_input=False)[:MAX_REPORTED]
    # A union of types has an error for each of them.
    return RequestError("; ".join(dict.fromkeys(map(_describe, details))), _field(details[0]))


def _field(detail: Any) -> str:
    return str(detail["loc"][0])[:MAX_NAME]


def _describe(detail: Any) -> str:
    place = _field(detail) + "".join(f"[{part}]" for part in detail["loc"][1:] if isinstance(part, int))
    if detail["type"] == "missing":
        return f"{'.'.join(map(str, detail['loc']))} is required"
    if detail["type"] == "extra_forbidden":
        return f"unknown field {place}"
    return f"{place}: {detail['msg'].removeprefix('Input ').removeprefix('Value error, ')}"
