"""The client's exceptions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class ScoremodeError(Exception):
    """Base of all errors of the client."""


class MissingPackageError(ScoremodeError):
    """A package is missing that is part of one of Scoremode's extras."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wrap the imports of an extra's packages. If one is missing, MissingPackageError names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "scoremode"):
            raise
        raise MissingPackageError(
            f"{package} is missing: it comes with an extra, scoremode[{name}], for the Python at {sys.executable}"
        ) from error


_EXTRAS = {
    "report": ("adjustText", "arch", "huggingface_hub", "jinja2", "matplotlib", "scipy", "statsmodels", "yaml"),
    "datasets": ("datasets",),
    "cuda": ("vllm",),
}
"""Maps extras to the packages that Scoremode imports from them."""


def require_extras(*names: str) -> None:
    """Raise MissingPackageError with all missing packages of several extras."""
    missing = {package: name for name in names for package in _EXTRAS[name] if find_spec(package) is None}
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        instead = " (cpu in place of cuda without an NVIDIA GPU)" if "cuda" in extras else ""
        raise MissingPackageError(
            f"missing: {', '.join(missing)}. Install scoremode[{extras}]{instead} for the Python at {sys.executable}"
        )


@contextmanager
def file_errors(kind: type[ScoremodeError], action: str) -> Iterator[None]:
    """Turn an OSError into an error of type `kind`. `action` says what failed, such as `read run.json`."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {action}: {error.strerror or error}") from error


class TransportError(ScoremodeError):
    """No answer came: the connection was refused, dropped or timed out. Retries have failed, or would not help."""


class APIStatusError(ScoremodeError):
    """The server answered with an HTTP error. The attributes are the status and the fields of the error's body."""

    def __init__(self, message: str, *, status_code: int, param: str | None = None, type: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.param = param
        self.type = type


class BadRequestError(APIStatusError):
    """400, 422: the request is at fault; `param` names the field."""


class AuthenticationError(APIStatusError):
    """401, 403: no API key, or a wrong one."""


class NotFoundError(APIStatusError):
    """404: no such model or reference, or no Scoremode at that address."""


class RateLimitError(APIStatusError):
    """429: too many requests, after all retries."""


class ServerError(APIStatusError):
    """5xx: the server is at fault."""


class ResponseError(ScoremodeError):
    """The server's answer does not follow the protocol."""


class CorpusError(ScoremodeError):
    """A text to score cannot be read, or does not have the required form."""


class RunError(ScoremodeError):
    """A finished run, a model card or a checkpoint cannot be used, or runs cannot be compared."""


class OutputError(ScoremodeError):
    """A result or its journal cannot be written, or a journal cannot be resumed."""


class ServersDifferError(ScoremodeError):
    """Servers that share a run serve different models, or a server changed its model during the run."""
