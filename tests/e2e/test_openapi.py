"""openapi/openapi.json is what the running server says of itself."""

import httpx

from write_openapi import OPENAPI, text


def test_the_file_is_what_the_running_app_says(server: str):
    assert OPENAPI.read_text() == text(httpx.get(f"{server}/openapi.json").json()), "stale: run `make openapi`"
