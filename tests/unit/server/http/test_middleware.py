"""Our middleware around vLLM's app: with an API key, every path but the open ones requires it, however the path is
written; and ids of requests."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient, WebSocketDenialResponse

from scoremode_server.http.middleware import OPEN_PATHS, Authentication, RequestIds
from tests.unit.server.light_app import ask
from write_openapi import app_without_engine

ODD_PATHS = (
    "//v1/score /v1//score /v1/score/ /V1/score /%76%31/score /v1%2Fscore /v1/score%0A /v1/score%00 /v1/score;health "
    "/v1/score?/health /health/../v1/score /health%2F..%2Fv1%2Fscore /health%0A /health%2Fx //health /HEALTH /healthz "
    "/%2568ealth /metrics/x /metricsx /static/../v1/score /static/other.js /nothing"
)


def guarded_app(**options: Any) -> Authentication:
    """An app that answers "inside" on every path of these tests, and accepts two keys."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path in ("/v1/score", *OPEN_PATHS):
        app.add_api_route(path, lambda: "inside", methods=["GET", "OPTIONS"])

    @app.websocket("/v1/realtime")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("inside")

    return Authentication(app, ["first key", "clé"], **options)


async def ask_with(*keys: str) -> httpx.Response:
    """The answer to a request with each key in a header of its own."""
    return await ask(guarded_app(), "/v1/score", headers=[("Authorization", key.encode("latin-1")) for key in keys])


def assert_refused(response: httpx.Response) -> None:
    assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert error.pop("message")
    assert error == {"type": "AuthenticationError", "param": None, "code": 401}


async def test_open_paths_and_preflight_requests_need_no_key():
    for path in ("/%68ealth", *OPEN_PATHS):
        assert (await ask(guarded_app(), path)).json() == "inside"
        assert (await ask(guarded_app(), f"{path}/")).status_code == 307
    assert (await ask(guarded_app(), "/v1/score", method="OPTIONS")).json() == "inside"


@pytest.mark.parametrize("path", ["/", *ODD_PATHS.split()])
async def test_oddly_written_paths_are_refused(path):
    # CVE-2026-48710: a URL made of host and path reads as another path than the one that is routed.
    assert_refused(await ask(guarded_app(), path, headers={"Host": "server/health?"}))


WRONG = ("first key", "Basic first key", "Bearer ", "Bearer first", "Bearer First key", "Bearer \xff")


@pytest.mark.parametrize("keys", [[], ["Bearer x", "Bearer clé"], *([key] for key in WRONG)])
async def test_wrong_keys_are_refused(keys):
    assert_refused(await ask_with(*keys))
    for key in ("Bearer first key", "bearer first key", "BEARER clé"):
        assert (await ask_with(key, *keys)).json() == "inside"


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        *(("/api", "/api/health", 200), ("/api", "/health", 200), ("/api", "/api/v1/score", 401)),
        *(("/api", "/api/api/health", 401), ("/api", "/apihealth", 401), ("/health", "/health", 401)),
        # vLLM guards prefixes, and reads this as "1/score", which Starlette routes to /v1/score.
        ("/v", "/v1/score", 401),
    ],
)
async def test_paths_below_a_root_path_are_guarded(root_path, path, status):
    assert (await ask(guarded_app(), path, root_path=root_path)).status_code == status


async def test_websockets_are_refused_before_they_open():
    client = TestClient(RequestIds(guarded_app()))
    with pytest.raises(WebSocketDenialResponse) as refusal, client.websocket_connect("/v1/realtime"):
        pass
    assert_refused(refusal.value)
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer first key"}) as websocket:
        assert websocket.receive_text() == "inside"
        assert b"x-request-id" in dict(websocket.extra_headers)


MINE = {"X-Request-Id": "mine"}


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """An app with a key, vLLM's request ids, and every route that vLLM has for a model that generates."""
    # vLLM's routes for SageMaker set the root logger, and its handlers, to ERROR.
    loggers = [logging.getLogger(), *logging.getLogger().handlers]
    levels = [each.level for each in loggers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "scoremode")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_API_KEY", "secret")
        # The general plugin's patches would outlive these tests.
        patch.setattr("scoremode_server.vllm_compat.install.install", lambda on_worker_start: None)
        app = app_without_engine("--enable-request-id-headers", "--enable-tokenizer-info-endpoint")
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)

        @app.get("/fails")
        async def fail() -> None:
            raise RuntimeError("the handler failed")

        yield app


async def test_every_route_is_open_on_purpose_or_needs_the_key(app):
    paths = {re.sub(r"\{.*?\}", "1", route.path): getattr(route, "methods", None) or {"GET"} for route in app.routes}
    assert {"/v1/score", "/invocations", "/generative_scoring", "/tokenizer_info", "/server_info"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods - {"OPTIONS"} if path not in OPEN_PATHS else ():
            response = await ask(app, path, method=method, headers=MINE)
            assert response.status_code == 401, (method, path)
            assert response.headers.get_list("X-Request-Id") == ["mine"]


def test_our_routes_come_before_vllms_and_replace_them(app):
    """A route that does not match takes 2 µs, twice per request."""
    paths = [getattr(route, "path", None) for route in app.routes]
    assert (paths[0], "/v1/score" in paths[:5], paths.count("/v1/completions")) == ("/v1/completions", True, 1)


async def test_an_unexpected_exception_has_an_id_and_is_counted(app):
    response = await ask(app, "/fails", headers={**MINE, "Authorization": "Bearer secret"})
    assert response.status_code == 500
    assert response.headers.get_list("X-Request-Id") == ["mine"]
    assert 'http_requests_total{handler="/fails"' in (await ask(app, "/metrics")).text


async def test_a_request_has_the_clients_id_if_it_can_be_used_or_its_own():
    app = FastAPI()

    @app.get("/")
    async def show(request: Request) -> list[str]:
        return [request.state.request_id, *request.headers.getlist("X-Request-Id")]

    bad = (b"", b"x" * 129, b"tab\there", b"line\nbreak", b"nul\0", b"\x7f", "é".encode())
    fresh = set()
    for given in (b"my run/7: <first>", b"~" * 128, *bad, None):
        headers = [] if given is None else [(b"X-Request-Id", given), (b"X-Request-Id", b"another")]
        response = await ask(RequestIds(app), "/", headers=headers)
        (request_id,) = response.headers.get_list("X-Request-Id")
        # Without one, the request's own header stays empty: vLLM prefers it to the body's `request_id`.
        assert response.json() == [request_id] * (1 if given is None else 2)
        if given is None or given in bad:
            fresh.add(request_id)
        else:
            assert request_id == given.decode()
    assert len(fresh) == len(bad) + 1
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in fresh)
