"""The page at `/scoremode`: only its own files, with headers that isolate it, and without a key."""

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from scoremode_server.api.page import FILES, FOLDER
from scoremode_server.plugin import ScoremodeEndpoints
from tests.unit.server.api.light_app import light_app

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_JS = "/scoremode/page.js"


async def ask(path: str, app: FastAPI | None = None, root_path: str = "", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app or light_app(), raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(transport=transport) as client:
        # httpx would tidy the path up before it is sent.
        return await client.get(httpx.URL("http://light").copy_with(raw_path=path.encode()), headers=headers)


def app_started_with(api_key: list[str] | None, *, no_page: bool) -> FastAPI:
    """An app with the plugin's routes, as vLLM makes it with these flags."""
    app = FastAPI()
    app.state.args = SimpleNamespace(
        log_error_stack=False, api_key=api_key, no_page=no_page, allowed_origins=[], allow_credentials=False
    )
    ScoremodeEndpoints().attach_router(app)
    init_exception_handler(app)
    return app


async def test_every_file_of_the_folder_is_served_and_isolated():
    assert set(FILES.values()) == {file for file in FOLDER.iterdir() if file.is_file()}
    assert FILES["/scoremode"] == FOLDER / "index.html"
    for path, file in FILES.items():
        response = await ask(path)
        assert (response.status_code, response.content) == (200, file.read_bytes())
        headers = response.headers
        assert headers["Content-Type"] == f"{TYPES[file.suffix]}; charset=utf-8"
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert headers["Content-Security-Policy"].split("; ") == [
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:"),
            *("connect-src 'self' http: https:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
            *("require-trusted-types-for 'script'", "trusted-types 'none'"),
        ]


async def test_unchanged_files_are_not_sent_again():
    first = await ask(PAGE_JS)
    assert first.headers["Cache-Control"] == "no-cache"
    for known in (first.headers["ETag"], f'"other", W/{first.headers["ETag"]}'):
        again = await ask(PAGE_JS, **{"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    assert (await ask("/scoremode/page.css", **{"If-None-Match": first.headers["ETag"]})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/scoremode/../settings.py", "/scoremode/..%2fsettings.py", "/scoremode/%2e%2e/settings.py", "/scoremode/"),
        *("/scoremode//etc/passwd", "/scoremode/index.html", f"{PAGE_JS}%00", f"{PAGE_JS}/", "/scoremode/PAGE.JS"),
    ],
)
async def test_no_path_leads_to_another_file(path):
    assert (await ask(path)).status_code in (307, 404)


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("api_key", [None, ["secret"]])
async def test_the_page_needs_no_key_and_can_be_turned_off(path, api_key, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app = app_started_with(api_key, no_page=False)
    assert (await ask(path, app)).status_code == 200
    assert (await ask("/scoremode/other.js", app)).status_code == (401 if api_key else 404)
    response = await ask(path, app_started_with(api_key, no_page=True))
    assert response.status_code == 404
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_the_page_loads_below_a_root_path_and_nothing_from_outside():
    for path in ("/scoring/scoremode", f"/scoring{PAGE_JS}"):
        assert (await ask(path, root_path="/scoring")).status_code == 200
    html = (FOLDER / "index.html").read_text()
    # There an absolute path would lead elsewhere.
    assert 'href="scoremode/page.css"' in html
    assert 'src="scoremode/page.js"' in html
    for file in FILES.values():
        code = file.read_text()
        assert not [part for part in ('src="/', 'href="/', 'from "/', "@import", "url(", "innerHTML") if part in code]
        assert "https://" not in code.replace("http:// or https://", "")


async def test_the_page_is_not_described_as_part_of_the_api():
    described = (await ask("/openapi.json")).json()["paths"]
    assert "/v1/score" in described
    assert not [path for path in described if path.startswith("/scoremode")]
