"""Requests that a running server refuses, each with its field at fault; and it continues to serve."""

from collections.abc import Iterator

import httpx
import pytest

from scoremode_server.settings import MAX_REQUEST_BYTES
from tests.bad_inputs import BAD_INPUTS, COMPLETIONS, JSON, PERPLEXITY, SCORE


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    """For all requests: a client reads every certificate authority anew, which takes longer than an answer."""
    with httpx.Client(base_url=server, timeout=60) as http:
        yield http


@pytest.mark.parametrize("bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS])
def test_a_bad_input_names_its_field_and_the_server_serves_on(http, bad):
    response = http.post(bad.route, content=bad.content, headers=bad.headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (bad.status, bad.status)
    assert error["param"] == bad.param
    assert error["message"].startswith(bad.message)
    assert set(error) == {"message", "type", "param", "code"}
    assert http.post(SCORE, json={"prompt": [5, 6]}).json()["data"][0]["num_scored"] == 1


@pytest.mark.parametrize("route", [SCORE, PERPLEXITY, COMPLETIONS])
def test_a_body_too_long_is_refused_and_the_connection_kept(http, route):
    response = http.post(route, content=b" " * (MAX_REQUEST_BYTES + 1), headers=JSON)
    assert response.status_code == 413
    assert "--max-request-bytes" in response.json()["error"]["message"]
    assert http.post(SCORE, json={"prompt": [5, 6]}).status_code == 200
