"""Requests whose client leaves, or whose server stops, before they are answered."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from scoremode_server.api.event_stream import EventStream
from scoremode_server.prefix_cache.admission import CLIENT_CLOSED_REQUEST
from scoremode_server.scoring.tokenizer import Tokenizer
from tests.bad_inputs import COMPLETIONS, JSON, PERPLEXITY, SCORE
from tests.unit.server.api.calls import client_of, leaving
from tests.unit.server.api.light_app import BLOCK_SIZE, light_app
from tests.unit.server.prefix_cache.fake_engine import HeldEngine


class NeverDone:
    """A scorer, and a handler of completions, that are cancelled before they answer."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def create_completion(self, *args: Any, **options: Any) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def scores(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        yield await self.create_completion()


@pytest.mark.parametrize(
    ("route", "fields"), [(SCORE, {}), (PERPLEXITY, {}), (COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 1})]
)
async def test_a_client_that_disconnects_ends_its_request(route, fields):
    app, never_done = light_app(), NeverDone()
    app.state.scoremode.scorer = app.state.scoremode.completions = never_done
    sent = await leaving(app, route, {"prompt": [5, 6], **fields}, never_done.begun)
    await asyncio.wait_for(never_done.cancelled.wait(), 60)
    assert sent[0]["status"] == CLIENT_CLOSED_REQUEST


async def settle() -> None:
    for _ in range(300):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("route", "body"),
    [(SCORE, {"prompt": [[5, 6, 7], [8, 9]]}), (PERPLEXITY, {"prompt": [5, 6, 7], "context_length": 2, "stride": 1})],
)
async def test_a_client_that_leaves_aborts_no_request_of_the_same_id(route, body):
    engine = HeldEngine(BLOCK_SIZE, "v2")
    async with client_of(light_app(engine=engine)) as client:
        requests = []
        for _ in range(2):
            requests.append(asyncio.create_task(client.post(route, json=body, headers={"X-Request-Id": "the same"})))
            # A request to `/v1/perplexity` plans its windows in a thread.
            await engine.has_any.wait()
            await settle()
            engine.has_any.clear()
        leaves, stays = requests
        of_leaving = set(engine.inside[:2])
        leaves.cancel()
        await settle()
        assert [set(call) for call in engine.aborted] == [of_leaving]
        assert len(set(engine.inside)) == 4
        engine.let_go.set()
        assert (await stays).status_code == 200


async def test_a_stream_that_no_client_can_read_is_closed_at_once():
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


async def check_stopping(app: FastAPI, route: str, body: bytes | AsyncIterator[bytes], begun: asyncio.Event) -> None:
    """A server that stops, without a time of grace, once it has begun with a request: the request is refused."""
    async with client_of(app) as client:
        request = asyncio.create_task(client.post(route, content=body, headers=JSON))
        await begun.wait()
        await app.state.scoremode.admission.drain(0)
        answer = await asyncio.wait_for(request, 60)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server is shutting down"
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("route", "fields"),
    [(SCORE, {}), (SCORE, {"continuations": ["and", "more"]}), (PERPLEXITY, {}), (PERPLEXITY, {"stream": True})],
)
async def test_stopping_refuses_texts_that_are_being_tokenized(route, fields):
    app, begun = light_app(), asyncio.Event()

    async def tokenize(prompts: Sequence[Any], params: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    app.state.scoremode.tokenizer = Tokenizer(SimpleNamespace(tokenizer=object(), tokenize_prompts_async=tokenize))
    await check_stopping(app, route, json.dumps({"prompt": "a text", **fields}).encode(), begun)


@pytest.mark.parametrize("route", [SCORE, PERPLEXITY, COMPLETIONS])
async def test_stopping_refuses_bodies_that_have_not_arrived(route):
    begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt"'
        begun.set()
        await asyncio.Event().wait()

    await check_stopping(light_app(), route, body(), begun)
