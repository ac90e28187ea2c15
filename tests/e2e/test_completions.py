"""`/v1/completions`: our response to a scoring request is vLLM's, field by field, from the same engine.

Each goes to our route and to vLLM's own, under /stock. Only `id` and `created` may differ, and floats by 1e-6; by
`oracle.PER_TOKEN` where a request has several sequences, which the engine may run in one step or in two.
"""

import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests import oracle
from tests.completion_requests import (
    NUM_PROMPTS,
    NUM_RANDOM,
    answers,
    is_one_sequence,
    prompts_that_begin_alike,
    requests,
)
from tests.e2e.metrics import metric
from tests.shared_servers import API_KEY

# A fixture chooses one of them by name.
pytestmark = pytest.mark.usefixtures("server", "plugin_server")
HITS = "scoremode_score_cache_hits_total"
SCORING = {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1}


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


@pytest.fixture(params=["plugin_server", "server"], ids=["SentencePiece's kind of tokenizer", "byte-level tokenizer"])
def url(request: pytest.FixtureRequest) -> str:
    address: str = request.getfixturevalue(request.param)
    return address


def test_every_scoring_request_gets_vllms_response(url):
    kinds = Counter[int]()
    with connect(url) as http:
        for body in requests(random.Random(20)):
            ours, stock = answers(http, body)
            try:
                assert_same(ours, stock, 1e-6 if is_one_sequence(body) else oracle.PER_TOKEN)
            except AssertionError as error:
                raise AssertionError(f"{json.dumps(body)}\n{error}") from None
            kinds[ours[0]] += 1
    assert kinds[200] > 40 + 0.7 * NUM_RANDOM, kinds


def test_prompts_with_a_common_prefix_get_vllms_responses(url):
    """Texts written for one prompt serve the next, also if a character spans the place where they part."""
    before = metric(url, HITS)
    with connect(url) as http:
        for body in prompts_that_begin_alike(random.Random(21)):
            assert_same(*answers(http, body), oracle.PER_TOKEN)
    assert metric(url, HITS) - before > 375 * NUM_PROMPTS


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [5] * 128},
        {"prompt": [5] * 129, "max_tokens": 0},
        {"prompt": "", "max_tokens": 0},
        {"prompt": [5, 10**6]},
        {"prompt": [[5, 6], []]},
        {"logprobs": -2},
        {"logprobs": 21},
        {"temperature": -1},
        {"model": "gpt-5"},
        {"prompt": "a", "model": "gpt-5"},
        {"prompt": "a", "n": 0},
        {"prompt": None},
    ],
)
def test_errors_are_vllms(plugin_server, change):
    with connect(plugin_server) as client:
        ours, stock = answers(client, SCORING | change)
    assert ours[0] >= 400
    assert_same(ours, stock)
