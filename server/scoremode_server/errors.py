"""The errors of the server. `http/requests.py` has the HTTP status of each error."""

RETRY_AFTER_SECONDS = 1
"""When a request that finds the server busy is to be sent again."""

MAX_NAME = 100
"""Characters of a name that are repeated to the client, who chose it."""


class RequestError(Exception):
    """A request that is refused or fails; `param` names the field at fault, if one is. All code that works on a
    request may raise it, so docstrings mention only subclasses. An error without a subclass is the request's fault."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class NotServedError(RequestError):
    """The server has no model, reference or page of that name."""


class ConflictError(RequestError):
    """A reference on disk is not the one that the request needs."""


class TooLargeError(RequestError):
    """The request can never fit this server."""


class EncodingError(RequestError):
    """The body is compressed."""


class BusyError(RequestError):
    """Other requests use all of the capacity."""


class UnavailableError(RequestError):
    """The engine or a file system does not answer, or the server stops."""


class OverdueError(RequestError):
    """The request took longer than it may."""


class StorageError(RequestError):
    """A file cannot be written."""


def engine_has_died() -> UnavailableError:
    """The error of requests that were with an engine which died, or came after it did."""
    return UnavailableError("the engine has died", None)


def stopping() -> UnavailableError:
    """The error of requests that a server which is about to stop does not answer."""
    return UnavailableError("the server is shutting down", None)


class EngineOutputError(RuntimeError):
    """The engine returned wrong or incomplete rows: status 500. All code that reads its output may raise this."""


class UnfinishedError(EngineOutputError):
    """The engine ended a request early: its finish reason is `abort` or `error`."""

    def __init__(self, finish_reason: str) -> None:
        super().__init__(f"the engine ended a request without logprobs ({finish_reason})")
        self.finish_reason = finish_reason
