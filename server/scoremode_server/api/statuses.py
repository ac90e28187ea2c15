"""The HTTP status of every error; no module below knows one."""

import asyncio
from http import HTTPStatus

from scoremode_server import errors

STATUSES = {
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

CLIENT_CLOSED_REQUEST = 499
"""The status, in logs and metrics, of a request whose client left."""


def status_of(error: BaseException | None) -> int:
    """The status of a request that ended with an error, or without one."""
    match error:
        case None:
            return HTTPStatus.OK
        case errors.RequestError():
            return STATUSES[type(error)]
        case asyncio.CancelledError() | GeneratorExit():
            return CLIENT_CLOSED_REQUEST
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR
