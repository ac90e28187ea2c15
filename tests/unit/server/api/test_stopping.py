"""What becomes of requests that are not accepted yet when the server stops."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from scoremode_server.scoring.tokenizer import Tokenizer
from tests.bad_inputs import COMPLETIONS, JSON, PERPLEXITY, SCORE
from tests.unit.server.api.light_app import light_app


async def stopped(app: FastAPI, route: str, body: bytes | AsyncIterator[bytes], begun: asyncio.Event) -> httpx.Response:
    """The answer of a server that stops, without a time of grace, as soon as it has begun with a request."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://light") as client:
        answer = asyncio.create_task(client.post(route, content=body, headers=JSON))
        await begun.wait()
        await app.state.scoremode.admission.drain(0)
        return await asyncio.wait_for(answer, 60)


def check_is_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server is shutting down"
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (SCORE, {"prompt": "a text"}),
        (SCORE, {"prompt": "a text", "continuations": ["and", "more"]}),
        (PERPLEXITY, {"prompt": "a text"}),
        (PERPLEXITY, {"prompt": "a text", "stream": True}),
    ],
)
async def test_a_text_that_is_being_tokenized(route: str, fields: dict[str, Any]):
    app, begun = light_app(), asyncio.Event()

    async def tokenize(prompts: Sequence[Any], params: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    app.state.scoremode.tokenizer = Tokenizer(SimpleNamespace(tokenizer=object(), tokenize_prompts_async=tokenize))
    check_is_refused(await stopped(app, route, json.dumps(fields).encode(), begun))


@pytest.mark.parametrize("route", [SCORE, PERPLEXITY, COMPLETIONS])
async def test_a_body_that_has_not_arrived_yet(route: str):
    begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt"'
        begun.set()
        await asyncio.Event().wait()

    check_is_refused(await stopped(light_app(), route, body(), begun))
