"""With an API key, every path but the open ones asks for it, however the path is written."""

from argparse import Namespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Message, Scope

from scoremode_server.api.authentication import OPEN_PATHS, Authentication, configured_keys

GUARDED = ["/v1/score", "/invocations", "/tokenize", "/tokenizer_info", "/load", "/server_info", "/"]


def guarded_app(**options: Any) -> Authentication:
    """An app that answers every path of these tests with "inside", and wants one of two keys."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path in (*GUARDED, *OPEN_PATHS):
        app.add_api_route(path, lambda: "inside", methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("inside")

    return Authentication(app, ["first key", "clé"], **options)


def connect(app: Authentication, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", **options)


async def ask(app: Authentication, path: str, *authorization: str, method: str = "GET") -> httpx.Response:
    headers = [("Authorization", value.encode("latin-1")) for value in authorization]
    async with connect(app) as client:
        return await client.request(method, path, headers=headers)


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error.pop("message")
    assert error == {"type": "AuthenticationError", "param": None, "code": 401}


@pytest.mark.parametrize("path", GUARDED)
async def test_without_a_key_nothing_is_answered(path: str):
    assert_refused(await ask(guarded_app(), path))
    assert_refused(await ask(guarded_app(), path, method="POST"))
    assert (await ask(guarded_app(), path, "Bearer first key")).json() == "inside"


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_open_paths_are_answered(path: str):
    assert (await ask(guarded_app(), path)).json() == "inside"
    assert (await ask(guarded_app(), f"{path}/")).status_code == 307


@pytest.mark.parametrize(
    "path",
    [
        "//v1/score",
        "/v1//score",
        "/v1/score/",
        "/V1/score",
        "/%76%31/score",
        "/v1%2Fscore",
        "/v1/score%0A",
        "/v1/score%00",
        "/v1/score;health",
        "/v1/score?/health",
        "/health/../v1/score",
        "/health%2F..%2Fv1%2Fscore",
        "/health%0A",
        "/health%2Fx",
        "//health",
        "/HEALTH",
        "/healthz",
        "/metrics/x",
        "/metricsx",
        "/static/../v1/score",
        "/static/other.js",
        "/nothing",
    ],
)
async def test_odd_paths_are_refused(path: str):
    # httpx would tidy the path up before it is sent.
    async with connect(guarded_app()) as client:
        url = httpx.URL("http://server").copy_with(raw_path=path.encode())
        assert_refused(await client.get(url))


async def test_the_host_header_is_no_part_of_the_path():
    # CVE-2026-48710: a URL made of both reads as another path than the one that is routed.
    async with connect(guarded_app()) as client:
        assert_refused(await client.get("/v1/score", headers={"Host": "server/health?"}))


async def test_a_path_is_decoded_once():
    assert (await ask(guarded_app(), "/%68ealth")).json() == "inside"
    assert_refused(await ask(guarded_app(), "/%2568ealth"))


@pytest.mark.parametrize(
    "authorization",
    [
        "first key",
        "Bearer",
        "Bearer ",
        "Bearer  first key",
        "Bearer first key ",
        "Bearer first",
        "Bearer First key",
        "Bearer first key,clé",
        "Basic first key",
        "Bearer \xff\xfe",
    ],
)
async def test_a_wrong_key_is_refused(authorization: str):
    assert_refused(await ask(guarded_app(), "/v1/score", authorization))


@pytest.mark.parametrize("authorization", ["Bearer first key", "bearer first key", "BEARER clé"])
async def test_any_of_the_keys_is_valid(authorization: str):
    assert (await ask(guarded_app(), "/v1/score", authorization)).json() == "inside"


async def test_of_two_authorizations_the_first_counts():
    assert_refused(await ask(guarded_app(), "/v1/score", "Bearer wrong", "Bearer first key"))


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/api", "/api/health", 200),
        ("/api", "/health", 200),
        ("/api", "/api/v1/score", 401),
        ("/api", "/v1/score", 401),
        ("/api", "/api/api/health", 401),
        ("/api", "/apihealth", 401),
        # By its prefixes vLLM takes the first for "1/score", which Starlette routes to /v1/score.
        ("/v", "/v1/score", 401),
        ("/v1", "/v1/score", 401),
        ("/health", "/health", 401),
    ],
)
async def test_below_a_root_path(root_path: str, path: str, status: int):
    app = guarded_app()

    async def behind_a_proxy(scope: Scope, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": root_path}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(behind_a_proxy), base_url="http://server") as client:
        assert (await client.get(path)).status_code == status


async def test_preflight_requests_of_browsers_pass():
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    async with connect(Authentication(app, ["key"])) as client:
        assert (await client.options("/v1/score", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"allowed_origins": ["*"]}, "*"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "http://page"),
        ({"allowed_origins": ["http://page"]}, "http://page"),
        ({"allowed_origins": ["http://other"]}, None),
    ],
)
async def test_a_page_that_may_read_answers_may_read_the_refusal(options: dict[str, Any], allowed: str | None):
    async with connect(guarded_app(**options)) as client:
        response = await client.post("/v1/score", headers={"Origin": "http://page"})
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


def test_starting_and_stopping_ask_for_no_key():
    app = FastAPI()
    events: list[str] = []
    app.router.on_startup.append(lambda: events.append("started"))
    with TestClient(Authentication(app, ["key"])):
        assert events == ["started"]


@pytest.mark.parametrize(
    ("arguments", "environment", "keys"),
    [
        (None, None, []),
        (None, "", []),
        (None, "environment", ["environment"]),
        ([], "environment", ["environment"]),
        (["a", "b"], "environment", ["a", "b"]),
        ([""], "environment", []),
        (["", "a"], None, ["a"]),
    ],
)
def test_keys_are_taken_as_vllm_takes_them(
    arguments: list[str] | None, environment: str | None, keys: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    assert configured_keys(Namespace(api_key=arguments)) == keys
