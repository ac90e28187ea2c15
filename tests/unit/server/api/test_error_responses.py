"""Bodies that are refused before an engine is needed, and bodies at the limit of bytes."""

import json
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
import pytest

from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PAGE, PERPLEXITY, SCORE, BadInput, page
from tests.unit.server.api.light_app import light_app, no_references

ROUTES = [SCORE, PERPLEXITY, COMPLETIONS]
GOOD = {"prompt": [5, 6, 7]}


def client(max_request_bytes: int = 16 * 1024**2) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(light_app(max_request_bytes, references=no_references), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://light")


@pytest.mark.parametrize(
    "bad",
    [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS if not row.needs_engine],
)
async def test_bad_input_names_its_field_and_the_server_goes_on(bad: BadInput):
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


async def chunks(body: bytes, size: int = 10) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_past_the_limit_is_refused_with_the_flag_that_sets_it(route: str):
    body = json.dumps(GOOD).encode()
    async with client(len(body) - 1) as http:
        whole = await http.post(route, content=body, headers=JSON)
        piecewise = await http.post(route, content=chunks(body), headers=JSON)
    for response in (whole, piecewise):
        assert response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert f"more than {len(body) - 1} bytes" in response.json()["error"]["message"]
        assert "--max-request-bytes" in response.json()["error"]["message"]


async def test_a_body_of_the_limit_is_read():
    body = json.dumps(GOOD).encode()
    async with client(len(body)) as http:
        assert (await http.post(SCORE, content=body, headers=JSON)).status_code == HTTPStatus.OK
        assert (await http.post(SCORE, content=chunks(body), headers=JSON)).status_code == HTTPStatus.OK


async def test_a_body_that_is_said_to_be_too_long_is_not_read():
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with client(10) as http:
        response = await http.post(SCORE, content=unread(), headers=JSON | {"Content-Length": "11"})
    assert response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


async def test_large_bodies_are_read_as_small_ones_are():
    async with client() as http:
        small = (await http.post(SCORE, json=GOOD)).json()
        padded = json.dumps(GOOD) + " " * 1_000_000
        large = (await http.post(SCORE, content=padded.encode(), headers=JSON)).json()
    assert large["data"] == small["data"]
