"""Bodies that are refused before an engine is needed, and bodies as long as the limit."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scoremode_server.api.requests import STATUSES
from scoremode_server.errors import RequestError
from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PERPLEXITY, SCORE
from tests.unit.server.api.light_app import client_of, client_of_model, light_app

GOOD = {"prompt": [5, 6, 7]}
BODY = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    "bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS if not row.needs_engine]
)
async def test_bad_input_names_its_field_and_the_server_still_answers(bad):
    async with client_of_model(Path("no-references")) as http:
        response = await http.post(bad.route, content=bad.content, headers=bad.headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (bad.status, bad.status, bad.param)
        assert error["message"].startswith(bad.message)
        assert len(error["message"]) < 1000
        assert set(error) == {"message", "type", "param", "code"}
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
