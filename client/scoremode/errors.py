"""Everything that the client raises.

ScoremodeError
├── TransportError          no answer: refused, dropped, timed out, after all retries
├── APIStatusError          an answer that is an error; has status_code, param, type
│   ├── BadRequestError     400, 422: `param` names the field
│   ├── AuthenticationError 401, 403
│   ├── NotFoundError       404: no such model, or no Scoremode at that address
│   ├── RateLimitError      429, after all retries
│   └── ServerError         5xx
├── ResponseError           an answer that is not what the protocol says
├── CorpusError             a text that cannot be read
├── RunError                a run's file that cannot be read, or runs that cannot be compared
├── OutputError             a result or its journal that cannot be written, or a journal that cannot be gone on with
└── ServersDifferError      servers of one run that do not serve the same
"""


class ScoremodeError(Exception):
    """Base of all errors of the client."""


class TransportError(ScoremodeError):
    """The server gave no answer."""


class APIStatusError(ScoremodeError):
    """The server answered with an error."""

    def __init__(self, message: str, *, status_code: int, param: str | None = None, type: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.param = param
        self.type = type


class BadRequestError(APIStatusError):
    """The request is at fault; `param` names the field."""


class AuthenticationError(APIStatusError):
    """No API key, or a wrong one."""


class NotFoundError(APIStatusError):
    """No such model or route."""


class RateLimitError(APIStatusError):
    """Too many requests, after all retries."""


class ServerError(APIStatusError):
    """The server is at fault."""


class ResponseError(ScoremodeError):
    """The server's answer is not what the protocol says."""


class CorpusError(ScoremodeError):
    """A text to be scored cannot be read."""


class RunError(ScoremodeError):
    """The file of a finished run cannot be read, or runs cannot be compared."""


class OutputError(ScoremodeError):
    """A result or its journal cannot be written, or a journal cannot be gone on with."""


class ServersDifferError(ScoremodeError):
    """Servers that share a run do not serve the same, or one came back after a failure as another."""
