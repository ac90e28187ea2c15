"""Requests whose time runs out while something else than the engine takes it: a slow reader, or a thread."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from scoremode_server.api import requests
from tests.bad_inputs import KLD, PERPLEXITY, REFERENCES
from tests.unit.server.api.light_app import client_of, light_app
from tests.unit.server.api.reference_engine import BODY, ReferenceEngine, record
from tests.unit.server.prefix_cache.cache_setup import LARGE

WITHOUT_NAME = {name: value for name, value in BODY.items() if name != "name"}
LIMITED = replace(LARGE, request_timeout=12_345)
TOO_LATE = "the request was not scored within 12345 s (--request-timeout)"


class Request:
    """The one request whose time is limited: ends its time, and waits for its line in the log."""

    def __init__(self) -> None:
        self.limits: list[asyncio.Timeout] = []
        self.statuses: list[int] = []
        self.is_over = asyncio.Event()

    def end(self) -> None:
        self.limits[0].reschedule(0)

    def info(self, text: str, request_id: str, route: str, status: int, *values: Any) -> None:
        self.statuses.append(status)
        self.is_over.set()


@pytest.fixture
def limited(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> Request:
    request, make_timeout = Request(), asyncio.timeout

    def timeout(delay: float | None) -> asyncio.Timeout:
        made = make_timeout(delay)
        if delay == LIMITED.request_timeout:
            request.limits.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", timeout)
    monkeypatch.setattr(requests, "logger", request)
    return request


@pytest.fixture
async def engine(tmp_path) -> ReferenceEngine:
    """With a reference, recorded without a limit of time."""
    engine = ReferenceEngine(tmp_path)
    async with client_of(light_app(engine)) as client:
        await record(client)
    return engine


@pytest.mark.parametrize(
    ("route", "body"),
    [(PERPLEXITY, WITHOUT_NAME), (REFERENCES, BODY | {"name": "another"}), (KLD, {"reference": "base"})],
)
async def test_a_stream_that_is_read_slowly_ends_with_the_error(route, body, engine: ReferenceEngine, limited: Request):
    app, sent = light_app(engine, size=LIMITED), []
    requests = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            if not limited.is_over.is_set():
                limited.end()
            await limited.is_over.wait()

    scope = {"type": "http", "method": "POST", "path": route, "query_string": b""}
    await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    first, *_, error, done, nothing = [message["body"] for message in sent if "body" in message]
    assert b"error" not in first
    assert json.loads(error.removeprefix(b"data: "))["error"] == {
        "message": TOO_LATE,
        "type": "GatewayTimeoutError",
        "param": None,
        "code": 504,
    }
    assert (done, nothing) == (b"data: [DONE]\n\n", b"")
    assert limited.statuses == [504]
