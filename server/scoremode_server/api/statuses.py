"""The HTTP status of every error; no module below knows one."""

import asyncio
from http import HTTPStatus

from scoremode_server.errors import (
    BusyError,
    ConflictError,
    EncodingError,
    NotServedError,
    OverdueError,
    RequestError,
    StorageError,
    TooLargeError,
    UnavailableError,
)

STATUSES = {
    RequestError: HTTPStatus.BAD_REQUEST,
    NotServedError: HTTPStatus.NOT_FOUND,
    ConflictError: HTTPStatus.CONFLICT,
    TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    EncodingError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    BusyError: HTTPStatus.TOO_MANY_REQUESTS,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    OverdueError: HTTPStatus.GATEWAY_TIMEOUT,
    StorageError: HTTPStatus.INSUFFICIENT_STORAGE,
}

CLIENT_CLOSED_REQUEST = 499
"""The status, in logs and metrics, of a request whose client left."""


def status_of(error: BaseException | None) -> int:
    """The status of a request that ended with an error, or without one."""
    match error:
        case None:
            return HTTPStatus.OK
        case RequestError():
            return STATUSES[type(error)]
        case asyncio.CancelledError() | GeneratorExit():
            return CLIENT_CLOSED_REQUEST
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR
