"""Ids of requests: the client's own, and what the engine gets."""

from fastapi import Request
from vllm.utils import random_uuid


def request_id_of(raw_request: Request) -> str:
    """The id that the client gave in `X-Request-Id`, or a fresh one."""
    given: str | None = getattr(raw_request.state, "request_id", None)
    return given or random_uuid()


def unique(request_id: str) -> str:
    """The id with which sequences go to the engine: two clients may give the same one at once."""
    return f"{request_id}-{random_uuid()[:8]}"
