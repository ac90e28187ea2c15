"""With an API key, every path but the open ones requires it, however the path is written."""

from argparse import Namespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient, WebSocketDenialResponse

from scoremode_server.api.middleware import OPEN_PATHS, Authentication, RequestIds, configured_keys
from tests.unit.server.api.light_app import ask

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
    headers = [("Authorization", key.encode("latin-1")) for key in keys]
    return await ask(guarded_app(), "/v1/score", headers=headers)


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


@pytest.mark.parametrize(
    ("origins", "allow_credentials", "allowed"),
    [(["*"], False, "*"), (["*"], True, "http://page"), (["http://other"], False, None)],
)
def test_pages_that_may_read_answers_may_read_the_refusal(origins, allow_credentials, allowed):
    app = guarded_app(allowed_origins=origins, allow_credentials=allow_credentials)
    response = TestClient(app).get("/v1/score", headers={"Origin": "http://page"})
    assert_refused(response)
    assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_websockets_are_refused_before_they_open():
    client = TestClient(RequestIds(guarded_app()))
    with pytest.raises(WebSocketDenialResponse) as refusal, client.websocket_connect("/v1/realtime"):
        pass
    assert_refused(refusal.value)
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer first key"}) as websocket:
        assert websocket.receive_text() == "inside"
        assert b"x-request-id" in dict(websocket.extra_headers)


@pytest.mark.parametrize(
    ("arguments", "environment", "keys"),
    [(None, "", []), ([], "one", ["one"]), (["a", "b"], "one", ["a", "b"]), (["", "a"], "one", ["a"])],
)
def test_keys_are_read_as_vllm_reads_them(arguments, environment, keys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", environment)
    assert configured_keys(Namespace(api_key=arguments)) == keys
