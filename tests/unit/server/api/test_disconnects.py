"""A client that disconnects while its request is computed is no error of the server."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from scoremode_server.api.event_stream import EventStream
from scoremode_server.prefix_cache.admission import CLIENT_CLOSED_REQUEST
from tests.bad_inputs import COMPLETIONS, PERPLEXITY, SCORE
from tests.unit.server.api.light_app import BLOCK_SIZE, light_app
from tests.unit.server.prefix_cache.fake_engine import HeldEngine


class NeverDone:
    """A scorer, and a handler of completions, that are cancelled before they answer."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def create_completion(self, *args: Any, **options: Any) -> None:
        self.begun.set()
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
    requests = [{"type": "http.request", "body": body}]
    sent = []

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await never_done.begun.wait()
        return {"type": "http.disconnect"}

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


async def settle() -> None:
    for _ in range(300):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("route", "body"),
    [(SCORE, {"prompt": [[5, 6, 7], [8, 9]]}), (PERPLEXITY, {"prompt": [5, 6, 7], "context_length": 2, "stride": 1})],
)
async def test_a_client_that_leaves_aborts_no_request_of_the_same_id(route: str, body: dict[str, Any]):
    engine = HeldEngine(BLOCK_SIZE, "v2")
    transport = httpx.ASGITransport(light_app(engine=engine))
    headers = {"X-Request-Id": "the same"}
    async with httpx.AsyncClient(transport=transport, base_url="http://light", headers=headers) as client:
        leaves = asyncio.create_task(client.post(route, json=body))
        # A request to `/v1/perplexity` plans its windows in a thread.
        await engine.has_any.wait()
        await settle()
        of_leaving = set(engine.inside)
        engine.has_any.clear()
        stays = asyncio.create_task(client.post(route, json=body))
        await engine.has_any.wait()
        await settle()
        leaves.cancel()
        await settle()
        assert [set(call) for call in engine.aborted] == [of_leaving]
        assert len(set(engine.inside)) == 4
        engine.let_go.set()
        assert (await stays).status_code == 200


async def test_a_stream_is_closed_as_soon_as_nobody_can_read_it():
    closed, sending = asyncio.Event(), asyncio.Event()

    async def contents() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            closed.set()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    # Kept here, so that the garbage collector does not close it.
    kept = contents()
    streaming = asyncio.create_task(EventStream(kept, "a request").stream_response(send))
    await sending.wait()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    assert closed.is_set()
