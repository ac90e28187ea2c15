"""Bodies that are refused before an engine is needed, and bodies as long as the limit."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PAGE, PERPLEXITY, SCORE, page
from tests.unit.server.api.light_app import light_app, no_references

GOOD = {"prompt": [5, 6, 7]}
BODY = json.dumps(GOOD).encode()


def client(max_request_bytes: int = 16 * 1024**2) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(light_app(max_request_bytes, references=no_references), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://light", headers=JSON)


@pytest.mark.parametrize(
    "bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS if not row.needs_engine]
)
async def test_bad_input_names_its_field_and_the_server_still_answers(bad):
    async with client() as http:
        response = await http.post(bad.route, content=bad.content, headers=bad.headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (bad.status, bad.status, bad.param)
        assert error["message"].startswith(bad.message)
        assert len(error["message"]) < 1000
        assert set(error) == {"message", "type", "param", "code"}
        assert (await http.post(SCORE, json=GOOD)).json()["data"][0]["num_scored"] == 2


def test_the_page_of_errors_has_all_of_them():
    assert PAGE.read_text() == page(), "stale: run `make errors`"


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 10):
        yield body[start : start + 10]


@pytest.mark.parametrize("route", [SCORE, PERPLEXITY, COMPLETIONS])
async def test_a_body_longer_than_the_limit_is_refused(route):
    async with client(len(BODY) - 1) as http:
        for response in (await http.post(route, content=BODY), await http.post(route, content=in_chunks(BODY))):
            assert response.status_code == 413
            message = response.json()["error"]["message"]
            assert message.startswith(f"the body has more than {len(BODY) - 1} bytes")
            assert "--max-request-bytes" in message


async def test_a_body_as_long_as_the_limit_is_read():
    async with client(len(BODY)) as http:
        assert (await http.post(SCORE, content=BODY)).status_code == 200
        assert (await http.post(SCORE, content=in_chunks(BODY))).status_code == 200


async def test_a_body_whose_header_exceeds_the_limit_is_not_read():
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with client(10) as http:
        response = await http.post(SCORE, content=unread(), headers={"Content-Length": "11"})
    assert response.status_code == 413


async def test_large_bodies_are_read_as_small_ones_are():
    async with client() as http:
        small, large = [(await http.post(SCORE, content=BODY + b" " * more)).json() for more in (0, 1_000_000)]
    assert large["data"] == small["data"]
