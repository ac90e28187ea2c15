"""A server with an API key, vLLM's own with the plugin: which routes answer without the key."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scoremode import AuthenticationError, ScoreClient
from scoremode_server.api.authentication import OPEN_PATHS
from tests import oracle
from tests.shared_servers import API_KEY, OTHER_API_KEY

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


def test_every_documented_route_but_the_open_ones_needs_the_key(stranger):
    documented = stranger.get("/openapi.json").json()["paths"]
    routes = {(method, path) for path, operations in documented.items() for method in operations}
    assert {("post", "/invocations"), ("post", "/tokenize"), ("post", "/v1/score")} <= routes
    # Of those that vLLM leaves out of its document a unit test of the app has all.
    routes |= {("get", "/tokenizer_info"), ("post", "/inference/v1/generate"), ("post", "/v1/load_lora_adapter")}
    for method, path in sorted(routes):
        if path.rstrip("/") not in OPEN_PATHS:
            assert_refused(stranger.request(method, path.replace("{", "").replace("}", ""), json=SCORING))


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/metrics/", "/openapi.json", "/docs"])
def test_probes_metrics_and_the_description_are_open(stranger, path):
    assert stranger.get(path).status_code == 200


def test_routes_answer_with_the_key(friend):
    for path in ("/invocations", "/v1/completions", "/stock/v1/completions"):
        assert friend.post(path, json=SCORING).status_code == 200
    assert friend.get("/tokenizer_info").status_code == 200


@pytest.mark.parametrize(
    "target", ["//invocations", "/%69nvocations", "/health/../invocations", "/invocations?/health"]
)
def test_no_spelling_of_a_path_needs_no_key(plugin_server, target):
    # Written to the socket unchanged: a client would tidy it up.
    url = httpx.URL(plugin_server)
    body = b'{"prompt": [5, 6, 7], "max_tokens": 1}'
    head = f"POST {target} HTTP/1.1\r\nHost: server/health?\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status = connection.makefile("rb").readline()
    assert status.split()[1] == b"401", status


def test_the_client_names_the_error(plugin_server):
    for key in (None, "wrong"):
        with ScoreClient(plugin_server, api_key=key) as client, pytest.raises(AuthenticationError, match="API key"):
            client.score([5, 6, 7])


def test_what_one_key_has_scored_is_computed_for_another(plugin_server, byte_fallback_model):
    tokens = [(11 * position + position**2) % 997 for position in range(100)]
    (expected,) = oracle.logprobs(byte_fallback_model, [tokens])
    answers, cached = [], []
    with httpx.Client(base_url=plugin_server, timeout=60) as client:
        for key in (API_KEY, API_KEY, OTHER_API_KEY, OTHER_API_KEY, API_KEY):
            response = client.post("/v1/score", json={"prompt": tokens}, headers={"Authorization": f"Bearer {key}"})
            answers.append(response.json()["data"][0]["logprobs"][1:])
            cached.append(response.json()["usage"]["cached_tokens"])
    assert cached == [0, 96, 0, 96, 96]
    assert answers[2] == answers[0]
    for logprobs in answers:
        oracle.assert_close(logprobs, expected)


def test_every_response_has_the_id_of_its_request(friend, stranger):
    for path in ("/health", "/nothing", "/v1/score", "/invocations", "/v1/models"):
        for client in (friend, stranger):
            response = client.get(path, headers={"X-Request-Id": "mine"})
            assert response.headers.get_list("X-Request-Id") == ["mine"]


@pytest.mark.parametrize("path", ["/v1/score", "/v1/completions", "/stock/v1/completions"])
def test_an_invalid_request_id_is_replaced(friend, path):
    body: dict[str, Any] = {"prompt": [5, 6, 7]} if path == "/v1/score" else SCORING
    response = friend.post(path, json=body, headers={"X-Request-Id": b"\xff"})
    assert response.status_code == 200
    (request_id,) = response.headers.get_list("X-Request-Id")
    assert len(request_id) == 32


async def test_equal_ids_of_requests_in_flight_do_not_meet(plugin_server):
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-Id": "the same"}
    async with httpx.AsyncClient(base_url=plugin_server, headers=headers, timeout=60) as client:
        prompts = [[5 + number, 6, 7, 8] for number in range(8)]
        responses = await asyncio.gather(
            *(client.post("/v1/completions", json={**SCORING, "prompt": prompt}) for prompt in prompts),
            *(client.post("/v1/score", json={"prompt": prompt}) for prompt in prompts),
        )
    assert [response.status_code for response in responses] == [200] * 16
    assert [response.json()["data"][0]["token_ids"] for response in responses[8:]] == prompts
