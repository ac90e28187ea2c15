"""A route's request: the parts of the server that answer it, its owner, its place in the queue, its log line."""

import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import Request
from vllm.logger import init_logger

from scoremode_server.api.statuses import status_of
from scoremode_server.app import ScoremodeState
from scoremode_server.prefix_cache.admission import Admission, RequestQueue

# vLLM prints what loggers below its own write.
logger = init_logger("vllm.scoremode")

_PLAIN_ID = re.compile(r"[!#-<>-~]*")
"""Printable ASCII without spaces, quotes and equals signs."""


def scoremode_state(request: Request) -> ScoremodeState:
    """The state of the app that received a request."""
    state: ScoremodeState = request.app.state.scoremode
    return state


def owner_of(request: Request) -> str:
    """The owner of a request, by its API key. Without keys all requests have one owner."""
    return scoremode_state(request).owner(request.headers.get("Authorization", ""))


@asynccontextmanager
async def accepted(
    admission: Admission, route: str, request_id: str, num_sequences: int = 0, num_tokens: int = 0
) -> AsyncGenerator[RequestQueue, None]:
    """`Admission.request`, with a line in the log at the end."""
    queue, failure = None, None
    try:
        async with admission.request(num_sequences, num_tokens) as queue:
            yield queue
    except BaseException as error:
        failure = error
        raise
    finally:
        if queue is not None:
            now = time.monotonic()
            entered = now if queue.entered is None else queue.entered
            # Texts and tokens never get into the log.
            logger.info(
                "request id=%s route=%s status=%d sequences=%d tokens=%d cached=%d waited=%.3f ran=%.3f",
                # The client chose it, and must not write other fields or lines.
                request_id if _PLAIN_ID.fullmatch(request_id) else json.dumps(request_id),
                route,
                status_of(failure),
                queue.num_scored,
                queue.num_scored_tokens,
                queue.num_cached_tokens,
                entered - queue.accepted,
                now - entered,
            )
