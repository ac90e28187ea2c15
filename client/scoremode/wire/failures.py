"""Turns an error answer from the server or a proxy into an exception."""

from http import HTTPStatus
from typing import Any, NamedTuple

import httpx
from pydantic import ValidationError

from scoremode._texts import excerpt, first_fault, json_object, printable
from scoremode.errors import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    RateLimitError,
    ResponseError,
    ServerError,
)

_CLASSES: dict[int, type[APIStatusError]] = {
    **dict.fromkeys((400, 422), BadRequestError),
    **dict.fromkeys((401, 403), AuthenticationError),
    404: NotFoundError,
    429: RateLimitError,
}
_WRONG_SERVER_HINT = (
    "; the server at this address has no such route, so it is probably not Scoremode: "
    "start it with `scoremode serve`, or `VLLM_PLUGINS=scoremode vllm serve`"
)


class _Failure(NamedTuple):
    message: str
    param: str | None = None
    type: str | None = None
    code: int | None = None


def status_error(status_code: int, body: bytes, path: str) -> APIStatusError:
    """The exception for an HTTP answer that is an error."""
    failure = _read_body(body)
    if not failure.message:
        failure = _Failure(httpx.codes.get_reason_phrase(status_code) or "error without a message")
    lacks_route = status_code in (404, 405) and _is_without_route(path, failure)
    return _exception(status_code, failure, _WRONG_SERVER_HINT if lacks_route else "")


def _is_without_route(path: str, failure: _Failure) -> bool:
    """Whether the server lacks the route itself, and not only the reference or model that the request names."""
    if "/v1/references" in path or "/v1/kld" in path:
        # FastAPI's answer for an unknown route.
        return failure.message == "Not Found"
    is_about_model = failure.param == "model" or "model" in failure.message.lower()
    return path.endswith(("/v1/score", "/v1/perplexity")) and not is_about_model


def event_error(error: object) -> APIStatusError:
    """The exception for an `{"error": ...}` event in a stream, whose HTTP status was sent before the error."""
    failure = _read_error(error)
    return _exception(failure.code or HTTPStatus.INTERNAL_SERVER_ERROR, failure)


def protocol_error(error: ValidationError) -> ResponseError:
    """The exception for an answer of the wrong shape: its first error, on one line."""
    return ResponseError(f"the server's answer is not what the protocol says: {printable(excerpt(first_fault(error)))}")


def _exception(status_code: int, failure: _Failure, hint: str = "") -> APIStatusError:
    if status_code == HTTPStatus.GATEWAY_TIMEOUT:
        hint = (
            "; raise the time limit of the server (--request-timeout) or of the proxy before it, "
            "or make the windows smaller (--context-length)"
        )
    error_class = _CLASSES.get(status_code, ServerError if status_code >= 500 else APIStatusError)
    # Keep the message on one line, because a terminal shows it if nothing catches the exception.
    message = printable(" ".join(f"{excerpt(failure.message)} (HTTP {int(status_code)}){hint}".split()))
    return error_class(message, status_code=int(status_code), param=failure.param, type=failure.type)


def _read_body(body: bytes) -> _Failure:
    """Read an error's body: OpenAI's shape, FastAPI's `detail`, or plain text from a proxy."""
    match json_object(body):
        case {"error": said}:
            return _read_error(said)
        case {"detail": [{"msg": message, "loc": [*_, field]}, *_]}:
            # The first of FastAPI's validation errors.
            return _Failure(str(message), str(field))
        case {"detail": detail}:
            return _Failure(str(detail))
    return _Failure(body.decode(errors="replace").strip()[:300])


def _read_error(error: Any) -> _Failure:
    if not isinstance(error, dict):
        return _Failure(str(error))
    code = error.get("code")
    param, kind = (None if error.get(name) is None else excerpt(error[name]) for name in ("param", "type"))
    is_status = isinstance(code, int) and 400 <= code < 600
    return _Failure(str(error.get("message") or error), param, kind, code if is_status else None)
