"""`/v1/completions`: our answer to a scoring request is vLLM's, field by field, from the same engine.

Each goes to our route and to vLLM's own, kept beside it. Only `id` and `created` may differ, and floats by 1e-6; by
1e-4 where a request has several sequences, which the engine may run in one step or in two, as they come.
"""

import json
import random
import re
from typing import Any

import httpx
import pytest

from tests import oracle
from tests.completion_requests import answers, is_one_sequence, prompts_that_begin_alike, requests
from tests.shared_servers import API_KEY

# Tests that choose a server by name need both.
pytestmark = pytest.mark.usefixtures("server", "plugin_server")


def connect(url: str) -> httpx.Client:
    """A client for any of the servers: one that has no API key takes no notice of it."""
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=300)


def assert_same(ours: Any, stock: Any, tolerance: float = 1e-6, path: str = "") -> None:
    """Equal but for ids, times and the last digits of floats; order of keys included."""
    assert type(ours) is type(stock), path
    if isinstance(ours, dict):
        assert list(ours) == list(stock), path
        for key in ours:
            if key not in ("id", "created"):
                assert_same(ours[key], stock[key], tolerance, f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(stock), path
        for index, (one, other) in enumerate(zip(ours, stock, strict=True)):
            assert_same(one, other, tolerance, f"{path}[{index}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(stock, abs=tolerance), path
    else:
        assert ours == stock, path


@pytest.mark.parametrize(
    ("which", "vocab_size", "max_tokens_fed", "num_random"),
    [("plugin_server", 1024, 127, 150), ("server", 1024, 60, 100)],
    ids=["SentencePiece's kind of tokenizer", "byte-level tokenizer"],
)
def test_every_scoring_request_is_answered_as_vllm_answers_it(
    request: pytest.FixtureRequest, which: str, vocab_size: int, max_tokens_fed: int, num_random: int
):
    rng = random.Random(20)
    kinds: dict[int, int] = {}
    with connect(request.getfixturevalue(which)) as client:
        for body in requests(rng, vocab_size, max_tokens_fed, num_random):
            ours, stock = answers(client, body)
            try:
                assert_same(ours, stock, 1e-6 if is_one_sequence(body) else oracle.PER_TOKEN)
            except AssertionError as error:
                raise AssertionError(f"{json.dumps(body)}\n{error}") from None
            kinds[ours[0]] = kinds.get(ours[0], 0) + 1
    assert kinds[200] > 40 + 0.7 * num_random, kinds


@pytest.mark.parametrize(
    ("which", "vocab_size", "num_prompts"),
    [("plugin_server", 1024, 4), ("server", 1024, 2)],
    ids=["SentencePiece's kind of tokenizer", "byte-level tokenizer"],
)
def test_prompts_that_begin_alike_are_answered_as_vllm_answers_them(
    request: pytest.FixtureRequest, which: str, vocab_size: int, num_prompts: int
):
    """What was written for one prompt is used for the next, also where a character lies across the place."""
    rng = random.Random(21)
    with connect(request.getfixturevalue(which)) as client:
        before = cache_hits(client)
        for body in prompts_that_begin_alike(rng, vocab_size, num_prompts):
            ours, stock = answers(client, body)
            assert_same(ours, stock, oracle.PER_TOKEN)
        assert cache_hits(client) - before > 375 * num_prompts


def cache_hits(client: httpx.Client) -> float:
    """Tokens so far whose logprob came from the cache."""
    (hits,) = re.findall(r"^scoremode_score_cache_hits_total (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(hits)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 128, "echo": True, "logprobs": 1, "max_tokens": 1},
        {"prompt": [5] * 129, "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": [5, 10**6], "echo": True, "logprobs": 1, "max_tokens": 1},
        {"prompt": [[5, 6], []], "echo": True, "logprobs": 1, "max_tokens": 1},
        {"prompt": [5, 6], "echo": True, "logprobs": -2, "max_tokens": 1},
        {"prompt": [5, 6], "echo": True, "logprobs": 21, "max_tokens": 1},
        {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": -1},
        {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1, "model": "gpt-5"},
        {"prompt": "a", "echo": True, "logprobs": 21, "max_tokens": 1},
        {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1, "model": "gpt-5"},
        {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": -1},
        {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1, "n": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 1},
    ],
)
def test_errors_are_vllms(plugin_server: str, body: dict[str, Any]):
    with connect(plugin_server) as client:
        ours, stock = answers(client, body)
    assert ours[0] >= 400
    assert_same(ours, stock)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5, -1], "echo": True, "logprobs": 1, "max_tokens": 1}, "prompt"),
        ({"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": "warm"}, "temperature"),
    ],
)
def test_a_field_that_is_no_valid_value_is_named_where_vllm_prints_a_dictionary(
    plugin_server: str, body: dict[str, Any], param: str
):
    with connect(plugin_server) as client:
        (status, answer), (stock_status, _) = answers(client, body)
    assert status == stock_status == 400
    assert (answer["error"]["type"], answer["error"]["param"]) == ("BadRequestError", param)
    assert answer["error"]["message"].startswith(param)


def test_no_tokens_to_generate_returns_exactly_the_prompt(server: str):
    body = {"prompt": "The capital of France", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"]
    assert choice["text"] == "The capital of France"
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:place])) for place in range(len(tokens))]
