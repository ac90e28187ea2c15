"""Requests whose clients leave before the answer."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from fastapi import Request, Response
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect

from scoremode_server.api.statuses import CLIENT_CLOSED_REQUEST

T = TypeVar("T")


def until_disconnect(
    handler: Callable[[T, Request], Coroutine[Any, Any, Response]],
) -> Callable[[T, Request], Coroutine[Any, Any, Response]]:
    """A handler that is cancelled when the client leaves. Unlike vLLM's `with_cancellation`, this waits until the
    handler has ended: nothing of a request outlives its answer."""

    @wraps(handler)
    async def run(request: T, raw_request: Request) -> Response:
        handling = asyncio.create_task(handler(request, raw_request))
        leaving = asyncio.create_task(listen_for_disconnect(raw_request))
        try:
            await asyncio.wait((handling, leaving), return_when=asyncio.FIRST_COMPLETED)
            return handling.result() if handling.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            await cancel_and_wait(handling, leaving)

    return run


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
