"""A server with an API key, vLLM's own with the plugin: what answers without the key, and what does not."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scoremode import AuthenticationError, ScoreClient
from scoremode_server.api.authentication import OPEN_PATHS
from tests.shared_servers import API_KEY

# Routes that vLLM leaves out of its OpenAPI document, of which some servers have a part.
UNDOCUMENTED = {
    "/abort_requests",
    "/collective_rpc",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/is_sleeping",
    "/metrics/",
    "/pause",
    "/pooling",
    "/reset_prefix_cache",
    "/resume",
    "/score",
    "/server_info",
    "/sleep",
    "/start_profile",
    "/stock/v1/completions",
    "/tokenizer_info",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/load_lora_adapter",
    "/v1/realtime",
    "/wake_up",
}
SCORING = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 0}


@pytest.fixture
def stranger(plugin_server: str) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=plugin_server, timeout=60) as client:
        yield client


@pytest.fixture
def friend(plugin_server: str) -> Iterator[httpx.Client]:
    """A client with the key."""
    with httpx.Client(base_url=plugin_server, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
        yield client


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 401, response.request.url
    assert response.headers["WWW-Authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 401


def test_every_route_is_open_on_purpose_or_asks_for_the_key(stranger: httpx.Client):
    documented = stranger.get("/openapi.json").json()["paths"]
    routes = {(method, path) for path, operations in documented.items() for method in operations}
    routes |= {(method, path) for path in UNDOCUMENTED for method in ("get", "post")}
    assert {("post", "/invocations"), ("post", "/tokenize"), ("post", "/v1/score")} <= routes
    for method, path in sorted(routes):
        if path.rstrip("/") not in OPEN_PATHS:
            assert_refused(stranger.request(method, path.replace("{", "").replace("}", ""), json=SCORING))


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/metrics/", "/openapi.json", "/docs"])
def test_probes_metrics_and_the_description_are_open(stranger: httpx.Client, path: str):
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/stock/v1/completions"])
def test_with_the_key_routes_that_score_answer(friend: httpx.Client, path: str):
    assert friend.post(path, json=SCORING).status_code == 200


def test_the_tokenizer_is_described_to_those_who_have_the_key(friend: httpx.Client, stranger: httpx.Client):
    assert friend.get("/tokenizer_info").status_code == 200
    assert_refused(stranger.get("/tokenizer_info"))


@pytest.mark.parametrize(
    "target",
    [
        "//invocations",
        "/invocations/",
        "/INVOCATIONS",
        "/%69nvocations",
        "/invocations%0a",
        "/health/../invocations",
        "http://server/invocations",
        "/invocations?/health",
        "/invocations#/health",
    ],
)
def test_no_way_to_write_a_path_gets_past(plugin_server: str, target: str):
    # Written to the socket as it is: a client would tidy it up.
    url = httpx.URL(plugin_server)
    body = b'{"prompt": [5, 6, 7], "max_tokens": 1}'
    head = f"POST {target} HTTP/1.1\r\nHost: server/health?\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status = connection.makefile("rb").readline()
    assert status.split()[1] == b"401", status


def test_the_client_names_the_error(plugin_server: str):
    for key in (None, "wrong"):
        with ScoreClient(plugin_server, api_key=key) as client, pytest.raises(AuthenticationError, match="API key"):
            client.score([5, 6, 7])


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/score", "/invocations", "/v1/models"])
def test_every_answer_has_the_id_of_its_request(friend: httpx.Client, stranger: httpx.Client, path: str):
    for client in (friend, stranger):
        response = client.get(path, headers={"X-Request-Id": "mine"})
        assert response.headers.get_list("X-Request-Id") == ["mine"]


@pytest.mark.parametrize("given", ["x" * 129, "é", "\xff"])
def test_an_id_that_cannot_be_used_is_replaced(friend: httpx.Client, given: str):
    headers = {"X-Request-Id": given.encode()}
    for path in ("/v1/score", "/v1/completions", "/stock/v1/completions"):
        body: dict[str, Any] = {"prompt": [5, 6, 7]} if path == "/v1/score" else SCORING
        response = friend.post(path, json=body, headers=headers)
        assert response.status_code == 200
        (request_id,) = response.headers.get_list("X-Request-Id")
        assert len(request_id) == 32


async def test_equal_ids_of_requests_in_flight_do_not_meet(plugin_server: str):
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-Id": "the same"}
    async with httpx.AsyncClient(base_url=plugin_server, headers=headers, timeout=60) as client:
        prompts = [[5 + number, 6, 7, 8] for number in range(8)]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={**SCORING, "prompt": prompt}) for prompt in prompts),
            *(client.post("/v1/score", json={"prompt": prompt}) for prompt in prompts),
        )
    assert [answer.status_code for answer in answers] == [200] * 16
    assert [answer.json()["data"][0]["token_ids"] for answer in answers[8:]] == prompts
