"""Requests to an app on the fake engine, and what references are recorded of there."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import light_app
from tests.unit.server.scoring.fake_reference_engine import ReferenceEngine

TOKENS = [(37 * position + position**2) % 997 for position in range(60)]
BODY: dict[str, Any] = {"name": "base", "prompt": TOKENS, "method": "sliding", "context_length": 16, "stride": 8}
NUM_WINDOWS = 7
"""Of 16 tokens each, of which the last 8 are scored; of the first one all but the first are."""


def app_of(engine: ReferenceEngine, **identity: Any) -> FastAPI:
    return light_app(engine=engine, references=engine.references(**identity))


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client; nothing may be left in the engine at the end."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://light", timeout=60) as client:
        yield client
    assert is_idle(app)


async def record(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post(REFERENCES, json={**BODY, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Status, field, message."""
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def is_idle(app: FastAPI) -> bool:
    admission = app.state.scoremode.admission
    return (admission.num_sequences, admission.num_tokens, admission.num_running) == (0, 0, 0)


async def leaving(app: FastAPI, path: str, body: dict[str, Any], leave: asyncio.Event) -> list[dict[str, Any]]:
    """What a client is sent that disconnects after its request."""
    requests, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], []

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    return sent
