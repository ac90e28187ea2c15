"""A client that disconnects while its request is computed is no error of the server."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from scoremode_server.api.responses import EventStream
from scoremode_server.prefix_cache.admission import CLIENT_CLOSED_REQUEST
from tests.bad_inputs import COMPLETIONS, PERPLEXITY, SCORE
from tests.unit.server.api.light_app import light_app


class NeverDone:
    """A scorer, and a handler of completions, that are cancelled before they answer."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def create_completion(self, *args: Any, **options: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def scores(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        yield await self.create_completion()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (SCORE, b'{"prompt": [5, 6]}'),
        (PERPLEXITY, b'{"prompt": [5, 6]}'),
        (COMPLETIONS, b'{"prompt": [5, 6], "echo": true, "logprobs": 1, "max_tokens": 1}'),
    ],
)
async def test_a_client_that_disconnects_ends_its_request(route: str, body: bytes):
    app, never_done = light_app(), NeverDone()
    app.state.scoremode.scorer = app.state.scoremode.completions = never_done
    received = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    sent = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return received.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": route,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    await asyncio.wait_for(never_done.cancelled.wait(), 60)
    assert sent[0]["status"] == CLIENT_CLOSED_REQUEST


async def test_a_stream_is_closed_as_soon_as_nobody_can_read_it():
    closed, sending = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
        finally:
            closed.set()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    # Kept here, so that the garbage collector does not close it.
    kept = events()
    streaming = asyncio.create_task(EventStream(kept).stream_response(send))
    await sending.wait()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    assert closed.is_set()
