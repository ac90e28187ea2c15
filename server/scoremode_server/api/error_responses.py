"""Errors as responses in OpenAI's shape, and the route class that answers with them."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.api.bodies import MAX_REPORTED, read_request, reader_of
from scoremode_server.api.statuses import CLIENT_CLOSED_REQUEST, STATUSES, status_of
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
        body: dict[str, Any] = create_error_response(str(error), kind, status, error.param).model_dump()
    else:
        body = create_error_response(error).model_dump()
    return body


def error_response(error: RequestError) -> JSONResponse:
    """A request's error as a response, with `Retry-After` where a retry may succeed."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if isinstance(error, BusyError | UnavailableError) else None
    return JSONResponse(error_content(error), status_code=status_of(error), headers=headers)


class ScoremodeRoute(APIRoute):
    """A route whose errors have OpenAI's shape. Requests with a body do not pass through FastAPI, whose models would
    look at each value again."""

    def get_route_handler(self) -> RouteHandler:
        if self.body_field is None:
            return with_error_responses(super().get_route_handler())
        model: Any = self.body_field.field_info.annotation
        read = reader_of(model)

        async def read_and_answer(request: Request) -> Response:
            response: Response | None = await self.endpoint(await read_request(request, read), request)
            # vLLM's routes return None if the client has left.
            return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response

        return with_error_responses(read_and_answer)


def with_error_responses(handle: RouteHandler) -> RouteHandler:
    """Write errors of requests in OpenAI's shape. All other errors go to vLLM's own handlers."""

    @wraps(handle)
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
        return error_response(failure)

    return handle_with_errors


def from_validation(error: ValidationError) -> RequestError:
    """One error whose `param` is the first field at fault, and whose message explains all faults."""
    details = error.errors(include_url=False, include_input=False)[:MAX_REPORTED]
    # A union of types has an error for each of them.
    return RequestError("; ".join(dict.fromkeys(map(_describe, details))), _field(details[0]))


def _field(detail: Any) -> str:
    return str(detail["loc"][0])[:MAX_NAME]


def _describe(detail: Any) -> str:
    field = _field(detail)
    place = field + "".join(f"[{part}]" for part in detail["loc"][1:] if isinstance(part, int))
    required = ".".join(map(str, detail["loc"]))
    messages = {"missing": f"{required} is required", "extra_forbidden": f"unknown field {place}"}
    reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return messages.get(detail["type"], f"{place}: {reason}")
