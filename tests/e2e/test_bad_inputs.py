"""Requests that only a running server refuses, each with its field at fault; and it continues to serve."""

import httpx
import pytest

from tests.bad_inputs import BAD_INPUTS, SCORE


@pytest.mark.parametrize(
    "bad", [pytest.param(row, id=f"{row.route}: {row.wrong}") for row in BAD_INPUTS if row.needs_engine]
)
def test_a_bad_input_names_its_field_and_the_server_serves_on(server, bad):
    bad.check(httpx.post(f"{server}{bad.route}", content=bad.content, headers=bad.headers, timeout=60))
    assert httpx.post(f"{server}{SCORE}", json={"prompt": [5, 6]}).json()["data"][0]["num_scored"] == 1
