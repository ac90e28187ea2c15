"""The errors of the server. `http/requests.py` has the HTTP status of each error."""

RETRY_AFTER_SECONDS = 1
"""Seconds after which a client should repeat a request that a busy server refused."""

MAX_NAME = 100
"""An error message repeats at most this many characters of a name from a request."""


class RequestError(Exception):
    """A request that is refused or fails; `param` names the field at fault, if there is one.

    A plain RequestError means that the request is at fault. All code that works on a request may raise it, so most
    docstrings mention only its subclasses.
    """

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class NotServedError(RequestError):
    """The server has no model, reference or page of that name."""


class ConflictError(RequestError):
    """A reference on disk cannot serve the request: it is another model's or text's, incomplete, or unreadable."""


class TooLargeError(RequestError):
    """The request can never fit this server."""


class EncodingError(RequestError):
    """The body is compressed."""


class BusyError(RequestError):
    """Other requests use all of the capacity."""


class UnavailableError(RequestError):
    """The engine or a file system does not answer, or the server is stopping."""


class OverdueError(RequestError):
    """The request took longer than it may."""


class StorageError(RequestError):
    """A file cannot be written."""


engine_errors: list[str] = []
"""Messages of the errors that ended this API server's engines. An engine that was killed has no message."""


def engine_dead_error() -> UnavailableError:
    return UnavailableError(
        ": ".join(["the engine has died: the server's log has its error", *engine_errors[:1]]), None
    )


def stopping_error() -> UnavailableError:
    return UnavailableError("the server is shutting down", None)


class NoKernelError(RuntimeError):
    """vLLM has no kernel for a model in its dtype on this machine."""


class EngineOutputError(RuntimeError):
    """The engine returned wrong or incomplete rows. All code that reads the engine's output may raise this."""


class UnfinishedError(EngineOutputError):
    """The engine ended a request early: its finish reason is `abort` or `error`."""

    def __init__(self, finish_reason: str) -> None:
        super().__init__(f"the engine ended a request without logprobs ({finish_reason})")
        self.finish_reason = finish_reason
