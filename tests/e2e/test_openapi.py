"""openapi/openapi.json is what the running server says of itself."""

import httpx

from write_openapi import OPENAPI, text


def test_the_file_is_what_the_running_app_says(server: str):
    served = httpx.get(f"{server}/openapi.json", timeout=60).json()
    assert OPENAPI.read_text() == text(served), "stale: run `make openapi`"
