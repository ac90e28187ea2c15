"""The page at `/scoremode`: only its own files, with headers that isolate it, and without a key."""

import pytest

from scoremode_server.api.page import FILES, FOLDER
from tests.unit.server.api.light_app import app_with_flags, ask, light_app

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


async def test_every_file_of_the_folder_is_served_and_isolated():
    assert set(FILES.values()) == {file for file in FOLDER.iterdir() if file.is_file()}
    assert FILES["/scoremode"] == FOLDER / "index.html"
    described = (await ask(light_app(), "/openapi.json")).json()["paths"]
    assert "/v1/score" in described
    assert not described.keys() & FILES.keys()
    for path, file in FILES.items():
        response = await ask(light_app(), path)
        assert (response.status_code, response.content) == (200, file.read_bytes())
        headers = response.headers
        assert headers["Content-Type"] == f"{TYPES[file.suffix]}; charset=utf-8"
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {*policy}


@pytest.mark.parametrize("api_key", [None, ["secret"]])
async def test_the_page_needs_no_key_and_can_be_turned_off(api_key, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    cors = {"allowed_origins": [], "allow_credentials": False}
    served, turned_off = (app_with_flags(api_key=api_key, no_page=each, **cors) for each in (False, True))
    assert (await ask(served, "/scoremode/other.js")).status_code == (401 if api_key else 404)
    for path in FILES:
        assert (await ask(served, path)).status_code == 200
        assert (await ask(turned_off, path)).status_code == 404
