"""The edges: the longest sequence, the shortest, and everything that is refused."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scoremode import ScoreClient
from tests import oracle
from tests.shared_servers import API_KEY

LENGTH = 128


def test_a_sequence_as_long_as_the_context_is_scored(bos_client: ScoreClient, byte_fallback_model: Path):
    tokens = np.random.default_rng(0).integers(3, 400, LENGTH).tolist()
    (score,) = bos_client.score(tokens)
    (expected,) = oracle.logprobs(byte_fallback_model, [tokens])
    assert np.abs(np.array(score.logprobs[1:]) - expected).max() <= 1e-4


def test_stock_vllm_refuses_that_sequence(plugin_server: str):
    response = post(
        plugin_server, "/v1/completions", {"prompt": [5] * LENGTH, "max_tokens": 1, "echo": True, "logprobs": 0}
    )
    assert response.status_code == 400


def test_one_token_has_nothing_to_score(bos_client: ScoreClient):
    (score,) = bos_client.score([7], top_logprobs=3, return_ranks=True)
    assert (score.num_scored, score.logprobs, score.ranks, score.top_logprobs) == (0, [None], [None], [None])


def test_a_tokenizer_that_adds_bos_gives_the_first_word_its_context(bos_client: ScoreClient):
    (with_bos,) = bos_client.score("one two")
    (without,) = bos_client.score("one two", add_special_tokens=False)
    assert with_bos.token_ids[0] == bos_client.info().bos_token_id
    assert with_bos.token_ids[1:] == without.token_ids
    assert with_bos.num_scored == without.num_scored + 1


EMPTY_CONTINUATION = {"prompt": "one", "continuations": [" two", ""]}

SCORE: list[tuple[str, Any, str | None, int, str]] = [
    ("no prompt", {}, "prompt", 400, "required"),
    ("an empty text", {"prompt": "", "add_special_tokens": False}, "prompt", 400, "empty"),
    ("an empty list", {"prompt": []}, "prompt", 400, "empty"),
    ("an empty sequence", {"prompt": [[5, 6], []]}, "prompt", 400, "prompt[1] is empty"),
    ("a token past the vocabulary", {"prompt": [1, 100000]}, "prompt", 400, "100000"),
    ("a negative token", {"prompt": [-1, 1]}, "prompt", 400, "-1"),
    ("a token past 64 bits", {"prompt": [1, 2**70]}, "prompt", 400, str(2**70)),
    ("a token past the vocabulary at the end", {"prompt": [[5, 6], [5, 100000]]}, "prompt", 400, "prompt[1]"),
    (
        "a prompt too long",
        {"prompt": [5] * (LENGTH + 1)},
        "prompt",
        400,
        f"{LENGTH + 1} tokens, but the model takes at most {LENGTH}",
    ),
    ("a prompt of numbers and texts", {"prompt": [1, "a"]}, "prompt", 400, "must be"),
    ("a prompt of booleans", {"prompt": [True, False]}, "prompt", 400, "must be"),
    ("a number as text", {"prompt": "a", "top_logprobs": "5"}, "top_logprobs", 400, "integer"),
    ("too many alternatives", {"prompt": "a", "top_logprobs": 21}, "top_logprobs", 400, "20"),
    ("an unknown field", {"prompt": "a", "temperature": 0}, "temperature", 400, "unknown field"),
    ("an unknown encoding", {"prompt": "a", "encoding_format": "hex"}, "encoding_format", 400, "base64"),
    ("an unknown model", {"prompt": "a", "model": "gpt-5"}, "model", 404, "gpt-5"),
    ("no continuation", {"prompt": "a", "continuations": []}, "continuations", 400, "empty"),
    ("an empty continuation", EMPTY_CONTINUATION, "continuations", 400, "continuations[1]"),
    (
        "a continuation too long",
        {"prompt": [5], "continuations": [[5] * LENGTH]},
        "continuations",
        400,
        f"{LENGTH + 1}",
    ),
    ("a list as the body", [1, 2], None, 400, "object"),
]

ROLLING_TOO_LONG = {"prompt": "a b", "method": "rolling", "context_length": LENGTH}
DISJOINT_WITH_STRIDE = {"prompt": "a b", "method": "disjoint", "context_length": 8, "stride": 4}

PERPLEXITY: list[tuple[str, Any, str | None, int, str]] = [
    ("no text", {}, "prompt", 400, "either"),
    ("a text twice", {"prompt": "a", "texts": ["a"]}, "prompt", 400, "either"),
    ("a text too short", {"prompt": [5]}, "prompt", 400, "1 tokens"),
    ("texts too short", {"texts": []}, "texts", 400, "0 tokens"),
    ("an unknown method", {"prompt": "a b", "method": "strided"}, "method", 400, "'sliding'"),
    ("a long window", {"prompt": "a b", "context_length": LENGTH + 1}, "context_length", 400, f"{LENGTH + 1} tokens"),
    ("a long rolling window", ROLLING_TOO_LONG, "context_length", 400, f"{LENGTH + 1} tokens"),
    ("a context of one", {"prompt": "a b", "context_length": 1}, "context_length", 400, "2"),
    ("a stride past the context", {"prompt": "a b", "context_length": 8, "stride": 9}, "stride", 400, "9"),
    ("a stride of nothing", {"prompt": "a b", "stride": 0}, "stride", 400, "1"),
    ("a stride for a method without", DISJOINT_WITH_STRIDE, "stride", 400, "no stride"),
    ("a token past the vocabulary", {"prompt": [5, 100000]}, "prompt", 400, "100000"),
    ("a fraction of a token", {"prompt": "a b", "max_tokens": 1.5}, "max_tokens", 400, "integer"),
]  # fmt: skip


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)


@pytest.mark.parametrize(
    ("path", "body", "param", "status", "part"),
    [
        pytest.param(path, *case[1:], id=f"{path}: {case[0]}")
        for path, cases in {"/v1/score": SCORE, "/v1/perplexity": PERPLEXITY}.items()
        for case in cases
    ],
)
def test_bad_input_names_its_field_and_the_server_goes_on(
    plugin_server: str, path: str, body: Any, param: str | None, status: int, part: str
):
    response = post(plugin_server, path, body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == status
    assert error["param"] == param
    assert part in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert post(plugin_server, "/v1/score", {"prompt": [5, 6]}).status_code == 200


def test_a_body_that_is_not_json(plugin_server: str):
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    response = httpx.post(f"{plugin_server}/v1/score", content=b'{"prompt": ', headers=headers)
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]


def test_an_api_key_guards_the_routes(plugin_server: str):
    for path in ("/v1/score", "/v1/perplexity"):
        assert httpx.post(plugin_server + path, json={"prompt": "a b"}).status_code == 401


def test_nothing_is_lost_in_a_stream_of_good_and_bad_requests(bos_client: ScoreClient, plugin_server: str):
    (expected,) = bos_client.score([5, 6, 7])
    for body in ({"prompt": [5, 100000]}, {"prompt": []}, {"prompt": [5] * 1000}):
        assert post(plugin_server, "/v1/score", body).status_code == 400
    assert (
        json.loads(post(plugin_server, "/v1/score", {"prompt": [5, 6, 7]}).text)["data"][0]["logprobs"]
        == expected.logprobs
    )
