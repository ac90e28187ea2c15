"""Requests that are refused before an engine is needed, bodies as long as the limit, and what a client may write into
logs and answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from scoremode_server.errors import RequestError
from scoremode_server.http import requests
from scoremode_server.http.requests import STATUSES
from scoremode_server.scoring.tokenizer import Tokenizer
from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PERPLEXITY, SCORE
from tests.models import random_llama
from tests.unit.server.engine.fake_engine import VOCABULARY
from tests.unit.server.light_app import app_with_completions, client_of, error_of, light_app
from tests.unit.server.references.reference_engine import ReferenceEngine

GOOD = {"prompt": [5, 6, 7]}
BODY = json.dumps(GOOD).encode()


@pytest.fixture(scope="module")
def app(random_model: Path) -> FastAPI:
    """An app with every route of the table, and a folder for references."""
    return app_with_completions(random_model, engine=ReferenceEngine(Path("no-references")))


@pytest.mark.parametrize("bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS])
async def test_bad_input_names_its_field_and_the_server_still_answers(app, bad):
    async with client_of(app) as http:
        bad.check(await http.post(bad.route, content=bad.content, headers=bad.headers))
        assert (await http.post(SCORE, json=GOOD)).json()["data"][0]["num_scored"] == 2


def test_every_error_has_a_status():
    assert {*STATUSES} == {RequestError, *RequestError.__subclasses__()}


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 10):
        yield body[start : start + 10]


@pytest.mark.parametrize(
    ("route", "limit", "status"),
    [(SCORE, len(BODY), 200), *((route, len(BODY) - 1, 413) for route in (SCORE, PERPLEXITY, COMPLETIONS))],
)
async def test_bodies_longer_than_the_limit_are_refused(route, limit, status):
    async with client_of(light_app(max_request_bytes=limit)) as http:
        for body in (BODY, in_chunks(BODY)):
            assert (await http.post(route, content=body, headers=JSON)).status_code == status


async def test_a_body_whose_header_exceeds_the_limit_is_not_read():
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with client_of(light_app(max_request_bytes=10)) as http:
        response = await http.post(SCORE, content=unread(), headers={**JSON, "Content-Length": "11"})
    assert response.status_code == 413


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are logged about requests."""
    lines: list[str] = []
    monkeypatch.setattr(requests.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


SCORES = {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1}


@pytest.mark.parametrize(
    ("route", "body", "headers", "logged"),
    [
        (SCORE, {"prompt": [5, 6]}, {"X-Request-Id": "run/7:a"}, 'id="score-run/7:a" route=/v1/score status=200 '),
        (
            SCORE,
            {"prompt": [5, 6]},
            {"X-Request-Id": 'a" route=/v1/kld status=500'},
            r'id="score-a\" route=/v1/kld status=500" route=/v1/score status=200 ',
        ),
        (
            COMPLETIONS,
            SCORES | {"request_id": "a\nrequest id=b\x1b[1m"},
            {},
            r'id="cmpl-a\nrequest id=b\u001b[1m" route=/v1/completions status=200 ',
        ),
    ],
)
async def test_no_id_of_a_request_passes_for_other_fields_of_its_line(
    random_model, lines, route, body, headers, logged
):
    async with client_of(app_with_completions(random_model)) as client:
        answer = await client.post(route, json=body, headers=headers)
    assert answer.status_code == 200
    (line,) = lines
    assert line.startswith(f"request {logged}")


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 200), (RequestError("no", "prompt"), 400), (ValueError(), 500), (asyncio.CancelledError(), 499)],
)
async def test_one_log_line_has_the_outcome_of_a_request(lines, error: BaseException | None, status: int):
    admission = light_app().state.scoremode.admission
    try:
        async with requests.accept(admission, "/v1/score", "score-7", 3, 30) as queue:
            queue.done(10, 4)
            if error is not None:
                raise error
    except type(error or ValueError):
        pass
    (line,) = lines
    assert line.startswith(
        f'request id="score-7" route=/v1/score status={status} sequences=1 tokens=10 cached=4 waited='
    )


@pytest.mark.parametrize("lane", ["prefill", "decode"])
async def test_an_answer_of_another_lane_says_so(lane: str):
    async with client_of(light_app()) as client:
        score = (await client.post("/v1/score", json={"prompt": [5, 6, 7], "lane": lane})).json()
        perplexity = (await client.post("/v1/perplexity", json={"prompt": [5, 6, 7], "lane": lane})).json()
    assert score.get("lane", "prefill") == perplexity["lane"] == lane
    assert [answer.get("mean_batch") is None for answer in (score, perplexity)] == [lane == "prefill"] * 2


async def test_an_unknown_model_is_answered_with_the_served_ones_and_adapters():
    app = light_app()
    app.state.scoremode.models.models.lora_requests = {"an-adapter": None}
    async with client_of(app) as client:
        response = await client.post("/v1/score", json={"model": "foo", "prompt": [5, 6]})
    message = "The model `foo` does not exist. The served model is called: m. Adapters: an-adapter."
    assert error_of(response) == (404, "model", message)


async def test_each_token_has_the_text_that_it_decodes_to(tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(random_llama(tmp_path, vocab_size=VOCABULARY))
    part, text = tokenizer.encode("💡")[0], "Größe 中文字 ภาษา 💡"
    async with client_of(light_app(tokenizer=tokenizer)) as client:
        for token_ids in (list(range(VOCABULARY)), [7, 7, part], []):
            answer = (await client.post("/v1/tokens", json={"token_ids": token_ids})).json()
            bytes_of = answer.pop("bytes")
            assert answer == {"object": "tokens", "tokens": [tokenizer.decode([each]) for each in token_ids]}
            incomplete = ["\ufffd" in each for each in answer["tokens"]]
            assert [each is not None for each in bytes_of] == incomplete
        # Together they are the text.
        answer = (await client.post("/v1/tokens", json={"token_ids": tokenizer.encode(text)})).json()
        contents = zip(answer["bytes"], answer["tokens"], strict=True)
        parts = [token.encode() if content is None else bytes.fromhex(content) for content, token in contents]
        assert (b"".join(parts).decode(), any(answer["bytes"])) == (text, True)


@pytest.mark.parametrize(
    ("piece", "content"),
    [("<0xE4>", "e4"), (b"\xe4\xb8", "e4b8"), ("\u00e4\u00b8", "e4b8"), ("Ġâ", "20e2"), ("中\ufffd", None)],
)
def test_a_tokens_bytes_are_those_of_its_vocabulary(piece, content):
    """SentencePiece's fallback, bytes themselves, byte-level BPE's alphabet, and another vocabulary."""
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token_ids: [piece])
    found = Tokenizer(SimpleNamespace(tokenizer=tokenizer)).bytes_of([1], ["\ufffd"])
    assert found == [content]


async def test_without_a_tokenizer_tokens_have_no_text():
    async with client_of(light_app()) as client:
        assert error_of(await client.post("/v1/tokens", json={"token_ids": [5]}))[:2] == (400, "token_ids")
