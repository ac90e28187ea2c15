"""The page at `/scoremode`: its files alone, with the headers that keep it to itself, and no key."""

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from scoremode_server.api.authentication import OPEN_PATHS
from scoremode_server.api.page import FILES, FOLDER
from scoremode_server.plugin import ScoremodeEndpoints
from scoremode_server.settings import add_arguments, serves_page
from tests.unit.server.api.light_app import light_app

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def connect(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://light")


async def ask(path: str, app: FastAPI | None = None, method: str = "GET", **headers: str) -> httpx.Response:
    async with connect(app or light_app()) as client:
        # httpx would tidy the path up before it is sent.
        url = httpx.URL("http://light").copy_with(raw_path=path.encode())
        return await client.request(method, url, headers=headers)


def app_started_with(monkeypatch: pytest.MonkeyPatch, *, api_key: list[str] | None, no_page: bool) -> FastAPI:
    """An app with the plugin's routes, as vLLM makes it with these flags."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app = FastAPI()
    app.state.args = SimpleNamespace(
        log_error_stack=False, api_key=api_key, no_page=no_page, allowed_origins=[], allow_credentials=False
    )
    ScoremodeEndpoints().attach_router(app)
    init_exception_handler(app)
    return app


def directives(policy: str) -> dict[str, list[str]]:
    return {name: values for name, *values in (part.split() for part in policy.split(";"))}


def test_every_file_of_the_folder_is_served():
    assert set(FILES.values()) == {file for file in FOLDER.iterdir() if file.is_file()}
    assert FILES["/scoremode"] == FOLDER / "index.html"
    assert {"/scoremode/page.js", "/scoremode/page.css"} <= FILES.keys()


@pytest.mark.parametrize(("path", "suffix", "content"), [(path, f.suffix, f.read_bytes()) for path, f in FILES.items()])
async def test_a_file_is_answered_as_it_is(path: str, suffix: str, content: bytes):
    response = await ask(path)
    assert response.status_code == 200
    assert response.content == content
    assert response.headers["Content-Type"] == f"{TYPES[suffix]}; charset=utf-8"


@pytest.mark.parametrize("path", FILES)
async def test_a_browser_may_load_nothing_else_and_ask_servers_alone(path: str):
    headers = (await ask(path)).headers
    assert directives(headers["Content-Security-Policy"]) == {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "connect-src": ["'self'", "http:", "https:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


async def test_what_has_not_changed_is_not_sent_again():
    first = await ask("/scoremode/page.js")
    assert first.headers["Cache-Control"] == "no-cache"
    for known in (first.headers["ETag"], f'"other", W/{first.headers["ETag"]}'):
        again = await ask("/scoremode/page.js", **{"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
    other = await ask("/scoremode/page.css", **{"If-None-Match": first.headers["ETag"]})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/scoremode/../settings.py",
        "/scoremode/..%2fsettings.py",
        "/scoremode/%2e%2e/settings.py",
        "/scoremode//etc/passwd",
        "/scoremode/page.js%00",
        "/scoremode/index.html",
        "/scoremode/",
        "/scoremode/page.js/",
        "/scoremode/PAGE.JS",
    ],
)
async def test_no_path_leads_anywhere_else(path: str):
    assert (await ask(path)).status_code in (307, 404)


async def test_below_a_root_path_the_page_is_where_its_server_is():
    transport = httpx.ASGITransport(light_app(), root_path="/scoring")
    async with httpx.AsyncClient(transport=transport, base_url="http://light") as client:
        assert (await client.get("/scoring/scoremode")).status_code == 200
        assert (await client.get("/scoring/scoremode/page.js")).status_code == 200


@pytest.mark.parametrize("path", FILES)
async def test_the_page_loads_without_a_key_and_scoring_does_not(path: str, monkeypatch: pytest.MonkeyPatch):
    app = app_started_with(monkeypatch, api_key=["secret"], no_page=False)
    assert path in OPEN_PATHS
    assert (await ask(path, app)).status_code == 200
    assert (await ask("/v1/score", app)).status_code == 401
    assert (await ask("/scoremode/other.js", app)).status_code == 401


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("api_key", [None, ["secret"]])
async def test_with_no_page_there_is_none(path: str, api_key: list[str] | None, monkeypatch: pytest.MonkeyPatch):
    response = await ask(path, app_started_with(monkeypatch, api_key=api_key, no_page=True))
    assert response.status_code == 404
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_the_flag_turns_it_off_and_stock_vllm_has_none():
    parser = ArgumentParser()
    add_arguments(parser)
    assert serves_page(parser.parse_args([]))
    assert not serves_page(parser.parse_args(["--no-page"]))
    assert serves_page(Namespace())


async def test_it_is_no_part_of_the_api():
    described = (await ask("/openapi.json")).json()["paths"]
    assert "/v1/score" in described
    assert not [path for path in described if path.startswith("/scoremode")]


def test_files_name_nothing_from_outside_and_nothing_by_an_absolute_path():
    html = (FOLDER / "index.html").read_text()
    # Below a root path, such as `--root-path /scoring`, an absolute path would lead elsewhere.
    assert 'href="scoremode/page.css"' in html
    assert 'src="scoremode/page.js"' in html
    for file in FILES.values():
        code = file.read_text()
        assert not [
            part for part in ('src="/', 'href="/', 'from "/', "@import", "url(", "innerHTML") if part in code
        ], file
        assert "https://" not in code.replace("http:// or https://", "")
