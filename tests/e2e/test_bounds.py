"""The edges: the longest sequence and the shortest."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from scoremode import ScoreClient
from tests import oracle
from tests.shared_servers import API_KEY

LENGTH = 128


def test_a_sequence_as_long_as_the_context_is_scored(bos_client: ScoreClient, byte_fallback_model: Path):
    tokens = np.random.default_rng(0).integers(3, 400, LENGTH).tolist()
    (score,) = bos_client.score(tokens)
    (expected,) = oracle.logprobs(byte_fallback_model, [tokens])
    oracle.assert_close(score.logprobs[1:], expected)


def test_stock_vllm_refuses_that_sequence(plugin_server: str):
    response = post(
        plugin_server, "/v1/completions", {"prompt": [5] * LENGTH, "max_tokens": 1, "echo": True, "logprobs": 0}
    )
    assert response.status_code == 400


def test_one_token_has_nothing_to_score(bos_client: ScoreClient):
    (score,) = bos_client.score([7], top_logprobs=3, return_ranks=True)
    assert (score.num_scored, score.logprobs, score.ranks) == (0, [None], [None])
    assert score.top_logprobs.token_ids.tolist() == [[-1, -1, -1]]
    assert np.isnan(score.top_logprobs.logprobs).all()


def test_a_tokenizer_that_adds_bos_gives_the_first_word_its_context(bos_client: ScoreClient):
    (with_bos,) = bos_client.score("one two")
    (without,) = bos_client.score("one two", add_special_tokens=False)
    assert with_bos.token_ids[0] == bos_client.info().bos_token_id
    assert with_bos.token_ids[1:] == without.token_ids
    assert with_bos.num_scored == without.num_scored + 1


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)


def test_an_api_key_guards_the_routes(plugin_server: str):
    for path in ("/v1/score", "/v1/perplexity"):
        assert httpx.post(plugin_server + path, json={"prompt": "a b"}, timeout=60).status_code == 401


def test_nothing_is_lost_in_a_stream_of_good_and_bad_requests(bos_client: ScoreClient, plugin_server: str):
    (expected,) = bos_client.score([5, 6, 7])
    for body in ({"prompt": [5, 100000]}, {"prompt": []}, {"prompt": [5] * 1000}):
        assert post(plugin_server, "/v1/score", body).status_code == 400
    assert (
        json.loads(post(plugin_server, "/v1/score", {"prompt": [5, 6, 7]}).text)["data"][0]["logprobs"]
        == expected.logprobs
    )
