"""Requests that are refused before an engine is needed, bodies as long as the limit, and what a client may write into
logs and answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scoremode_server.api import requests
from scoremode_server.api.requests import STATUSES
from scoremode_server.errors import RequestError
from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PERPLEXITY, SCORE
from tests.unit.server.api.light_app import client_of, client_of_model, error_of, light_app

GOOD = {"prompt": [5, 6, 7]}
BODY = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    "bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS if not row.needs_engine]
)
async def test_bad_input_names_its_field_and_the_server_still_answers(bad):
    async with client_of_model(Path("no-references")) as http:
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


@pytest.mark.parametrize(
    ("request_id", "logged"),
    [("run/7:a", "run/7:a"), ('a" route=/v1/kld status=500', r'"score-a\" route=/v1/kld status=500"')],
)
async def test_no_id_of_a_request_passes_for_other_fields_of_its_line(monkeypatch, request_id: str, logged: str):
    lines: list[str] = []
    monkeypatch.setattr(requests.logger, "info", lambda text, *values: lines.append(text % values))
    async with client_of(light_app()) as client:
        await client.post(SCORE, json=GOOD, headers={"X-Request-Id": request_id})
    (line,) = lines
    assert f"{logged} route=/v1/score status=200 " in line


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 200), (RequestError("no", "prompt"), 400), (ValueError(), 500), (asyncio.CancelledError(), 499)],
)
async def test_one_log_line_has_the_outcome_of_a_request(monkeypatch, error: BaseException | None, status: int):
    lines: list[str] = []
    monkeypatch.setattr(requests.logger, "info", lambda text, *values: lines.append(text % values))
    admission = light_app().state.scoremode.admission
    try:
        async with requests.accepted(admission, "/v1/score", "score-7", 3, 30) as queue:
            queue.done(10, 4)
            if error is not None:
                raise error
    except type(error or ValueError):
        pass
    (line,) = lines
    assert line.startswith(f"request id=score-7 route=/v1/score status={status} sequences=1 tokens=10 cached=4 waited=")


@pytest.mark.parametrize(("field", "value"), [("lane", "verify"), ("context", 5)])
async def test_lanes_that_the_engine_lacks_are_refused(field: str, value: object):
    async with client_of(light_app()) as client:
        answers = [await client.post(route, json=GOOD | {field: value}) for route in (SCORE, PERPLEXITY)]
    assert [error_of(answer)[:2] for answer in answers] == [(400, field)] * 2


@pytest.mark.parametrize("lane", ["prefill", "decode"])
async def test_an_answer_of_another_lane_says_so(lane: str):
    async with client_of(light_app()) as client:
        score, perplexity = [
            (await client.post(route, json=GOOD | {"lane": lane})).json() for route in (SCORE, PERPLEXITY)
        ]
    assert score.get("lane", "prefill") == perplexity["lane"] == lane
    for answer in (score, perplexity):
        assert (answer.get("mean_batch") is None) == (lane == "prefill")
