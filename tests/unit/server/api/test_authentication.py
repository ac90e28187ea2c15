"""With an API key, every path but the open ones asks for it, however the path is written."""

from argparse import Namespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Message

from scoremode_server.api.authentication import OPEN_PATHS, Authentication, configured_keys

GUARDED = ["/v1/score", "/invocations", "/tokenizer_info", "/"]
ODD_PATHS = (
    "//v1/score /v1//score /v1/score/ /V1/score /%76%31/score /v1%2Fscore /v1/score%0A /v1/score%00 /v1/score;health "
    "/v1/score?/health /health/../v1/score /health%2F..%2Fv1%2Fscore /health%0A /health%2Fx //health /HEALTH /healthz "
    "/%2568ealth /metrics/x /metricsx /static/../v1/score /static/other.js /nothing"
)


def guarded_app(**options: Any) -> Authentication:
    """An app that answers "inside" on every path of these tests, and accepts two keys."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path in (*GUARDED, *OPEN_PATHS):
        app.add_api_route(path, lambda: "inside", methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("inside")

    return Authentication(app, ["first key", "clé"], **options)


async def ask(
    path: str, *authorization: str, method: str = "GET", root_path: str = "", **headers: str
) -> httpx.Response:
    """The answer to a path as it is written: httpx would tidy it up."""
    keys = [("Authorization", value.encode("latin-1")) for value in authorization]
    transport = httpx.ASGITransport(guarded_app(), root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        url = httpx.URL("http://server").copy_with(raw_path=path.encode())
        return await client.request(method, url, headers=[*headers.items(), *keys])


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error.pop("message")
    assert error == {"type": "AuthenticationError", "param": None, "code": 401}


@pytest.mark.parametrize("path", GUARDED)
async def test_guarded_paths_answer_only_with_a_key(path):
    for method in ("GET", "POST"):
        assert_refused(await ask(path, method=method))
        assert (await ask(path, "Bearer first key", method=method)).json() == "inside"


async def test_open_paths_answer_without_a_key():
    for path in ("/%68ealth", *OPEN_PATHS):
        assert (await ask(path)).json() == "inside"
        assert (await ask(f"{path}/")).status_code == 307


@pytest.mark.parametrize("path", ODD_PATHS.split())
async def test_oddly_written_paths_are_refused(path):
    assert_refused(await ask(path))


async def test_the_host_header_is_not_part_of_the_path():
    # CVE-2026-48710: a URL made of both reads as another path than the one that is routed.
    assert_refused(await ask("/v1/score", Host="server/health?"))


@pytest.mark.parametrize(
    "authorization",
    [
        *("first key", "Basic first key", "Bearer", "Bearer ", "Bearer  first key", "Bearer first key "),
        *("Bearer first", "Bearer First key", "Bearer first key,clé", "Bearer \xff\xfe"),
    ],
)
async def test_wrong_keys_are_refused(authorization):
    assert_refused(await ask("/v1/score", authorization))


async def test_either_key_is_valid_and_only_the_first_header_counts():
    for authorization in ("Bearer first key", "bearer first key", "BEARER clé"):
        assert (await ask("/v1/score", authorization)).json() == "inside"
    assert_refused(await ask("/v1/score", "Bearer wrong", "Bearer first key"))


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/api", "/api/health", 200),
        ("/api", "/health", 200),
        ("/api", "/api/v1/score", 401),
        ("/api", "/v1/score", 401),
        ("/api", "/api/api/health", 401),
        ("/api", "/apihealth", 401),
        # vLLM guards prefixes, and takes this for "1/score", which Starlette routes to /v1/score.
        ("/v", "/v1/score", 401),
        ("/v1", "/v1/score", 401),
        ("/health", "/health", 401),
    ],
)
async def test_paths_below_a_root_path_are_guarded(root_path, path, status):
    assert (await ask(path, root_path=root_path)).status_code == status


async def test_preflight_requests_of_browsers_pass():
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert TestClient(Authentication(app, ["key"])).options("/v1/score", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"allowed_origins": ["*"]}, "*"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "http://page"),
        ({"allowed_origins": ["http://page"]}, "http://page"),
        ({"allowed_origins": ["http://other"]}, None),
    ],
)
def test_pages_that_may_read_answers_may_read_the_refusal(options, allowed):
    response = TestClient(guarded_app(**options)).post("/v1/score", headers={"Origin": "http://page"})
    assert_refused(response)
    assert response.headers.get("Access-Control-Allow-Origin") == allowed


def test_websockets_are_refused_before_they_open():
    client = TestClient(guarded_app())
    with pytest.raises(WebSocketDenialResponse) as refusal, client.websocket_connect("/v1/realtime"):
        pass
    assert_refused(refusal.value)
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer first key"}) as websocket:
        assert websocket.receive_text() == "inside"


async def test_a_server_that_cannot_refuse_a_websocket_closes_it():
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    await guarded_app()({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


@pytest.mark.parametrize(
    ("arguments", "environment", "keys"),
    [
        (None, "", []),
        (None, "environment", ["environment"]),
        ([], "environment", ["environment"]),
        (["a", "b"], "environment", ["a", "b"]),
        ([""], "environment", []),
        (["", "a"], "", ["a"]),
    ],
)
def test_keys_are_read_as_vllm_reads_them(arguments, environment, keys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", environment)
    assert configured_keys(Namespace(api_key=arguments)) == keys
