"""Errors as responses in OpenAI's shape."""

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.serve import create_error_response

from scoremode_server.errors import RequestError

_MAX_REPORTED = 5

RETRY_AFTER_SECONDS = 2


def from_validation(error: RequestValidationError) -> RequestError:
    """One error that names the first field at fault and says what is wrong with each."""
    found = [_describe(detail) for detail in error.errors()[:_MAX_REPORTED]]
    return RequestError("; ".join(message for _, message in found), found[0][0] if found else None)


def _describe(detail: Any) -> tuple[str | None, str]:
    """(field, message) of one validation error, which vLLM's own checks raise as a plain string."""
    if not isinstance(detail, dict):
        return None, str(detail)
    if detail["type"] == "json_invalid":
        return None, f"the body is not valid JSON: {detail['ctx']['error']}"
    field = ".".join(str(part) for part in detail["loc"][1:])
    if not field:
        return None, "the body must be a JSON object"
    messages = {"missing": f"{field} is required", "extra_forbidden": f"unknown field {field}"}
    reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return field, messages.get(detail["type"], f"{field}: {reason}")


def error_content(error: Exception) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`, for errors that are not a request's as vLLM has it."""
    if isinstance(error, RequestError):
        kind = f"{error.status.phrase.title().replace(' ', '')}Error"
        body: dict[str, Any] = create_error_response(str(error), kind, error.status, error.param).model_dump()
    else:
        body = create_error_response(error).model_dump()
    return body


def error_response(error: RequestError) -> JSONResponse:
    """A request's error as a response; a client that may try again is told when."""
    later = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if later else None
    return JSONResponse(error_content(error), status_code=error.status, headers=headers)


class ScoremodeRoute(APIRoute):
    """A route whose bad requests are answered with the field at fault.

    vLLM's own handler for validation errors puts a Python dictionary into the message; every other error stays vLLM's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                failure = from_validation(error)
            except RequestError as error:
                failure = error
            return error_response(failure)

        return handle_with_errors
