"""What can go wrong in the server. `api.error_responses` turns these into HTTP."""

from http import HTTPStatus

MAX_NAME = 100
"""Characters of a name that are repeated to the client, who chose it."""


class RequestError(Exception):
    """A request that is not answered; `param` names the field at fault, if one is."""

    def __init__(self, message: str, param: str | None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


def engine_has_died() -> RequestError:
    """The error of requests that were with an engine which died, or came after it did."""
    return RequestError("the engine has died", None, HTTPStatus.SERVICE_UNAVAILABLE)


def stopping() -> RequestError:
    """The error of requests that a server which is about to stop does not answer."""
    return RequestError("the server is shutting down", None, HTTPStatus.SERVICE_UNAVAILABLE)


class EngineOutputError(RuntimeError):
    """The engine returned something that is not the score of what was asked. Reported as 500, never as a number."""


class UnfinishedError(EngineOutputError):
    """The engine ended a request early: its finish reason is `abort` or `error`."""

    def __init__(self, finish_reason: str) -> None:
        super().__init__(f"the engine ended a request without logprobs ({finish_reason})")
        self.finish_reason = finish_reason
