"""Requests whose clients leave before the answer."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from fastapi import Request, Response

from scoremode_server.api.statuses import CLIENT_CLOSED_REQUEST

T = TypeVar("T")


def until_disconnect(
    handler: Callable[[T, Request], Coroutine[Any, Any, Response]],
) -> Callable[[T, Request], Coroutine[Any, Any, Response]]:
    """A handler that is cancelled when the client leaves. The request then counts as 499."""

    @wraps(handler)
    async def run(request: T, raw_request: Request) -> Response:
        handling = asyncio.create_task(handler(request, raw_request))
        leaving = asyncio.create_task(_left(raw_request))
        try:
            await asyncio.wait((handling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                return handling.result()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            await cancel_and_wait(leaving, handling)

    return run


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _left(raw_request: Request) -> None:
    """Wait until the client has left. The body must have been read."""
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass
