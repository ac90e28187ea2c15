"""Requests whose client leaves or does not read, or whose server stops, before they are answered."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from scoremode_server.completions.routes import GENERATE
from scoremode_server.http import requests
from scoremode_server.http.requests import CLIENT_CLOSED_REQUEST
from scoremode_server.http.responses import ClosingStream, in_own_task
from scoremode_server.references import comparer
from scoremode_server.scoring.tokenizer import Tokenizer
from tests.bad_inputs import COMPLETIONS, JSON, KLD, PERPLEXITY, REFERENCES, SCORE
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.engine.fake_engine import VOCABULARY, until
from tests.unit.server.light_app import app_with_completions, client_of, error_of, leaving, light_app
from tests.unit.server.references.reference_engine import BODY, ReferenceEngine, record

EXPORT = f"{REFERENCES}/base/llama.cpp"
NUM_EXPORTED = 7
WINDOW_BYTES = 7 * (VOCABULARY + 4) * 2
"""A window of 16 tokens has 7 targets, each with two bytes per token of the vocabulary and 8 more."""
SCORES = {"echo": True, "logprobs": 1, "max_tokens": 1}


class NeverDone:
    """A tokenizer and a body that are cancelled before they are there."""

    tokenizer = object()

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def wait(self, *args: Any, **options: Any) -> None:
        self.begun.set()
        await asyncio.Event().wait()

    tokenize_prompts_async = wait

    async def body(self) -> AsyncIterator[bytes]:
        yield b'{"prompt"'
        await self.wait()


@pytest.mark.parametrize(
    ("route", "body", "num_sequences"),
    [
        (SCORE, {"prompt": [[5, 6, 7], [8, 9]]}, 2),
        (PERPLEXITY, {"prompt": [5, 6, 7], "context_length": 2, "stride": 1}, 2),
        (COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9]], **SCORES}, 2),
        (GENERATE, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}, 1),
    ],
)
async def test_a_client_that_leaves_aborts_no_request_of_the_same_id(random_model, route, body, num_sequences):
    app = app_with_completions(random_model)
    engine = app.state.scoremode.client
    engine.let_go.clear()
    leave = asyncio.Event()
    leaves = asyncio.create_task(leaving(app, route, body, leave, "the same"))
    async with client_of(app) as client:
        await until(lambda: len(engine.inside) == num_sequences)
        stays = asyncio.create_task(client.post(route, json=body, headers={"X-Request-Id": "the same"}))
        await until(lambda: len(engine.inside) == 2 * num_sequences)
        leave.set()
        assert (await asyncio.wait_for(leaves, 60))[0]["status"] == CLIENT_CLOSED_REQUEST
        # The answer comes after the end of what was cancelled.
        assert engine.num_running == num_sequences
        assert {each for call in engine.aborted for each in call} <= set(engine.inside[:num_sequences])
        assert len(set(engine.inside)) == 2 * num_sequences
        engine.let_go.set()
        answer = await stays
    assert answer.status_code == 200
    assert answer.json().get("id", answer.json().get("request_id")).endswith("-the same")


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [("POST", REFERENCES, BODY), ("POST", KLD, {"reference": "base"}), ("GET", EXPORT, None)],
)
async def test_a_client_that_leaves_ends_its_recording_or_its_reading(tmp_path, method, route, body):
    app, leave = light_app(engine := ReferenceEngine(tmp_path)), asyncio.Event()
    async with client_of(app) as client:
        if route != REFERENCES:
            await record(client, method="llama.cpp", stride=None)
        engine.let_go.clear()
        leaves = asyncio.create_task(leaving(app, route, body, leave, method=method))
        await until(lambda: engine.num_running)
        leave.set()
        assert (await asyncio.wait_for(leaves, 60))[0]["status"] == CLIENT_CLOSED_REQUEST
        assert engine.num_running == 0


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        *((SCORE, {}), (SCORE, {"continuations": ["and", "more"]}), (PERPLEXITY, {"stream": True})),
        # The body has not arrived.
        *((SCORE, None), (COMPLETIONS, None)),
    ],
)
async def test_stopping_refuses_texts_that_are_read_or_tokenized(route, fields):
    """Without a grace period."""
    app, never_done = light_app(), NeverDone()
    app.state.scoremode.tokenizer = Tokenizer(never_done)
    body = never_done.body() if fields is None else json.dumps({"prompt": "a text", **fields}).encode()
    async with client_of(app) as client:
        request = asyncio.create_task(client.post(route, content=body, headers=JSON))
        await never_done.begun.wait()
        await app.state.scoremode.admission.drain(0)
        answer = await asyncio.wait_for(request, 60)
    assert error_of(answer) == (503, None, "the server is shutting down")
    assert int(answer.headers["Retry-After"]) > 0


async def test_a_stream_that_no_client_can_read_is_closed_at_once():
    closed, sending = asyncio.Event(), asyncio.Event()

    async def contents(queue: None) -> AsyncGenerator[bytes, None]:
        try:
            yield b"1"
        finally:
            closed.set()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    # Referenced here, so that the garbage collector does not close it.
    stored = ClosingStream(in_own_task(nullcontext(), contents))
    streaming = asyncio.create_task(stored.stream_response(send))
    await sending.wait()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    assert closed.is_set()


async def test_a_stream_that_is_read_slowly_ends_with_the_error(monkeypatch):
    """Its time runs out while the client reads the first event."""
    is_over = asyncio.Event()
    app = light_app(size=replace(LARGE, request_timeout=12_345))

    async def read_slowly() -> None:
        if not is_over.is_set():
            (limit,) = app.state.scoremode.admission.timeouts
            limit.reschedule(0)
        await is_over.wait()

    monkeypatch.setattr(requests.logger, "info", lambda *_: is_over.set())
    body = {"prompt": [5, 6, 7], "context_length": 2, "stride": 1, "stream": True}
    sent = await leaving(app, PERPLEXITY, body, asyncio.Event(), read=read_slowly)
    first, *_, error, done, nothing = [message["body"] for message in sent if "body" in message]
    assert b"error" not in first
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 504
    assert (done, nothing) == (b"data: [DONE]\n\n", b"")


async def test_slow_readers_hold_a_bounded_number_of_windows_together(tmp_path, monkeypatch):
    monkeypatch.setattr(comparer, "BYTES_AHEAD", 2 * WINDOW_BYTES)
    monkeypatch.setattr(comparer, "EXPORTED_BYTES", 4 * WINDOW_BYTES)
    app, leave = light_app(engine := ReferenceEngine(tmp_path)), asyncio.Event()
    async with client_of(app) as client:
        await record(client, prompt=[each % 997 for each in range(NUM_EXPORTED * 16)], method="llama.cpp", stride=None)
        whole = (await client.get(EXPORT)).content
        assert len(whole) > NUM_EXPORTED * WINDOW_BYTES
        engine.computed.clear()
        slow = [asyncio.create_task(leaving(app, EXPORT, None, leave, read=leave.wait, method="GET")) for _ in range(2)]
        await until(lambda: len(engine.computed) == 2 * 2)
        await asyncio.sleep(0.2)
        assert len(engine.computed) == 2 * 2
        answer = await client.get(EXPORT)
        assert error_of(answer)[0] == 429
        assert int(answer.headers["Retry-After"]) > 0
        # Others are served.
        assert (await client.get(f"{REFERENCES}/base")).status_code == 200
        leave.set()
        await asyncio.gather(*slow)
        assert (await client.get(EXPORT)).content == whole
