"""Large answers take space from before they are computed until their clients have taken them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from scoremode_server.completions.routes import GENERATE
from scoremode_server.http import responses
from scoremode_server.http.responses import VALUE_BYTES
from scoremode_server.references import comparer
from scoremode_server.scoring import limits
from tests.bad_inputs import COMPLETIONS, KLD, SCORE
from tests.unit.server.engine.fake_engine import FakeEngine, until
from tests.unit.server.light_app import app_with_completions, client_of, error_of, leaving, light_app
from tests.unit.server.references.reference_engine import NUM_WINDOWS, ReferenceEngine, record

FLOAT, BASE64 = VALUE_BYTES["float"], VALUE_BYTES["base64"]
IDS = [[1, 2, 3], [4, 5]]
TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
# One row for each token of a prompt in completions, and for all but the first in windows.
COMPLETED = BASE64 * 5 * 2
# Eleven figures of a position take the space of six logprobs with their ids. Two top tokens are of both models.
COMPARED = 6 + 2 * 2
LONG = {"prompt": [[(7 * place + at) % 1000 for at in range(2000)] for place in range(8)], "top_logprobs": 4}


async def held_while_sent(app: Any, route: str, body: dict[str, Any]) -> int:
    """The bytes that are held while an answer is sent; none may be held after that."""
    space, held = app.state.scoremode.answers, []

    async def read() -> None:
        held.append(space.num_bytes)

    sent = await leaving(app, route, body, asyncio.Event(), read=read)
    assert (sent[0]["status"], space.num_bytes, len(set(held))) == (200, 0, 1), sent
    return held[0]


async def test_every_answer_with_logprobs_counts(llama_2_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses, "LARGE_BYTES", 0)
    app = app_with_completions(llama_2_model)
    for route, body, num_bytes in (
        (SCORE, {"prompt": IDS, "top_logprobs": 2}, FLOAT * 5 * 3),
        (SCORE, {"prompt": IDS, "encoding_format": "base64"}, BASE64 * 5),
        (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 1}, COMPLETED),
        (GENERATE, {"token_ids": IDS[0], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}, BASE64 * 3),
    ):
        assert await held_while_sent(app, route, body) == num_bytes
    assert await held_while_sent(app, "/v1/turns", TURNS) >= FLOAT * 2
    light = light_app(ReferenceEngine(tmp_path))
    async with client_of(light) as client:
        await record(client)
    kld = {"reference": "base", "top_logprobs": 2}
    assert await held_while_sent(light, KLD, kld) == FLOAT * COMPARED * 59
    assert await held_while_sent(light, KLD, {**kld, "stream": True}) == BASE64 * COMPARED * 59
    # A stream holds no more than the windows that are computed ahead, or the longest.
    monkeypatch.setattr("scoremode_server.references.routes.BYTES_AHEAD", 1)
    held = await held_while_sent(light, KLD, {**kld, "stream": True})
    assert BASE64 * COMPARED * 7 <= held <= BASE64 * COMPARED * 16


async def test_a_comparison_that_is_not_read_computes_few_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparer, "BYTES_AHEAD", 3 * 16 * 5 * 16)
    app, leave = light_app(engine := ReferenceEngine(tmp_path)), asyncio.Event()
    async with client_of(app) as client:
        await record(client)
        engine.computed.clear()
        body = {"reference": "base", "top_logprobs": 4, "stream": True}
        reading = asyncio.create_task(leaving(app, KLD, body, leave, read=leave.wait))
        await until(lambda: len(engine.computed) == 3)
        for _ in range(1000):
            await asyncio.sleep(0)
        # One that is sent, and two.
        assert len(engine.computed) == 3 < NUM_WINDOWS
        leave.set()
        await reading


@asynccontextmanager
async def served_at(app: Any, socket: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The app served by uvicorn, whose socket takes some hundred kilobytes that its client does not read."""
    server = uvicorn.Server(uvicorn.Config(app, uds=str(socket), lifespan="off", log_config=None))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), timeout=60) as client:
        yield client
    server.should_exit = True
    await running


async def test_answers_wait_for_those_that_slow_clients_have_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They wait before the engine gets them; small ones pass, and the largest passes alone."""
    num_bytes = FLOAT * 5 * 8 * 2000
    monkeypatch.setattr(responses, "ANSWER_BYTES", num_bytes - 1)
    app, path = light_app(engine := FakeEngine(16)), tmp_path / "socket"
    space, admission = app.state.scoremode.answers, app.state.scoremode.admission
    content = json.dumps(LONG).encode()
    head = f"POST {SCORE} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    async with served_at(app, path) as client:

        async def ask() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_unix_connection(str(path), limit=1000)
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            return reader, writer

        reader, slow = await ask()
        await until(lambda: admission.num_sequences == 0)
        assert (space.num_bytes, engine.num_requests) == (num_bytes, 8)
        waiting = asyncio.create_task(client.post(f"http://light{SCORE}", json=LONG))
        await until(lambda: admission.num_sequences == 8)
        assert (await client.post(f"http://light{SCORE}", json={"prompt": [1, 2]})).status_code == 200
        assert (space.num_bytes, engine.num_requests, waiting.done()) == (num_bytes, 9, False)
        sent = await reader.read(-1)
        # JSON, with its keys and digits, is longer than what is counted, but not twice as long.
        assert num_bytes / 2 < len(sent) < 2 * num_bytes
        answer = (await waiting).json()
        assert json.loads(sent.partition(b"\r\n\r\n")[2])["data"] == answer["data"]
        slow.close()
        await until(lambda: space.num_bytes == 0)
        _, gone = await ask()
        gone.close()
        await until(lambda: space.num_bytes == 0)


async def test_an_answer_for_which_there_is_no_space_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses, "SECONDS_TO_WAIT", 0)
    app = light_app(engine := FakeEngine(16))
    app.state.scoremode.answers.num_bytes = responses.ANSWER_BYTES
    async with client_of(app) as client:
        answer = await client.post(SCORE, json=LONG)
    assert error_of(answer)[:2] == (429, None)
    assert (
        "answers to other clients take 1073741824 of 1073741824 bytes, and this one would take 5120000" in answer.text
    )
    assert (int(answer.headers["Retry-After"]) > 0, engine.num_requests) == (True, 0)
    assert app.state.scoremode.answers.num_bytes == responses.ANSWER_BYTES


def test_the_largest_answer_takes_half_of_the_space():
    assert {limits.MAX_VALUES[name] * size for name, size in VALUE_BYTES.items()} == {responses.ANSWER_BYTES // 2}
