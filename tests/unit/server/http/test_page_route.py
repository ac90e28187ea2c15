"""The page at `/scoremode`: only its own files, with headers that isolate it, and without a key."""

import pytest

from scoremode_server.http.page import FILES, FOLDER
from tests.unit.server.light_app import app_with_flags, ask, light_app

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_JS = "/scoremode/page.js"


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
        assert headers["Content-Security-Policy"].split("; ") == [
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:"),
            *("connect-src 'self' http: https:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
            *("require-trusted-types-for 'script'", "trusted-types 'none'"),
        ]


@pytest.mark.parametrize(
    "path",
    [
        *("/scoremode/../settings.py", "/scoremode/..%2fsettings.py", "/scoremode/%2e%2e/settings.py", "/scoremode/"),
        *("/scoremode//etc/passwd", "/scoremode/index.html", f"{PAGE_JS}%00", f"{PAGE_JS}/", "/scoremode/PAGE.JS"),
    ],
)
async def test_no_path_leads_to_another_file(path):
    assert (await ask(light_app(), path)).status_code in (307, 404)


@pytest.mark.parametrize("api_key", [None, ["secret"]])
async def test_the_page_needs_no_key_and_can_be_turned_off(api_key, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    served, turned_off = (
        app_with_flags(api_key=api_key, no_page=each, allowed_origins=[], allow_credentials=False)
        for each in (False, True)
    )
    assert (await ask(served, "/scoremode/other.js")).status_code == (401 if api_key else 404)
    for path in FILES:
        assert (await ask(served, path)).status_code == 200
        assert (await ask(turned_off, path)).status_code == 404


async def test_the_page_loads_below_a_root_path_and_nothing_from_outside():
    assert (await ask(light_app(), f"/scoring{PAGE_JS}", root_path="/scoring")).status_code == 200
    for file in FILES.values():
        code = file.read_text()
        assert not [part for part in ('src="/', 'href="/', 'from "/', "@import", "url(", "innerHTML") if part in code]
        assert "https://" not in code.replace("http:// or https://", "")
