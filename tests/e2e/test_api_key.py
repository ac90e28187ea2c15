"""A server with an API key, vLLM's own with the plugin: which routes answer without the key."""

import httpx

from tests import oracle
from tests.shared_servers import API_KEY, OTHER_API_KEY

SCORING = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 0}


def test_routes_answer_with_the_key_and_open_ones_without(plugin_server):
    headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-Id": "mine"}
    for path in ("/invocations", "/v1/completions", "/stock/v1/completions", "/v1/score"):
        body = {"prompt": [5, 6, 7]} if path == "/v1/score" else SCORING
        for given, status in ((headers, 200), ({"X-Request-Id": "mine"}, 401)):
            response = httpx.post(f"{plugin_server}{path}", json=body, headers=given, timeout=60)
            assert response.status_code == status
            assert response.headers.get_list("X-Request-Id") == ["mine"]
    for path in ("/health", "/metrics/", "/openapi.json"):
        assert httpx.get(f"{plugin_server}{path}", timeout=60).status_code == 200


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
