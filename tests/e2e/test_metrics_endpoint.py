"""`/metrics` counts the tokens that were scored and the requests, through every route that scores."""

import httpx
import pytest

from scoremode import ScoreClient
from tests.e2e.metrics import metric


@pytest.fixture
def tokens(client: ScoreClient) -> list[int]:
    return client.tokenize("Every way to score a text comes to the same counter in the end. " * 8)[:100]


def counted(server: str) -> list[float]:
    """Tokens scored, requests that waited, requests that ran."""
    names = ("scored_tokens_total", "request_waiting_seconds_count", "request_running_seconds_count")
    return [metric(server, f"scoremode_{name}") for name in names]


def added(server: str, before: list[float]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(counted(server), before, strict=True))


def test_scores_count_with_the_cache_and_without(client, server, tokens):
    before = counted(server)
    client.score([tokens, tokens[:5]])
    client.score(tokens)
    client.score(tokens, use_cache=False)
    client.score(tokens[:50], [tokens[50:53], tokens[60:61]])
    assert added(server, before) == (99 + 4 + 99 + 99 + 52 + 50, 6, 6)


def test_completions_count_their_prompt_if_they_score(server, tokens):
    before = counted(server)
    scoring = {"prompt": [tokens, tokens[:10]], "echo": True, "logprobs": 1}
    generating = {"prompt": tokens, "logprobs": 1, "max_tokens": 2}
    for body in (scoring | {"max_tokens": 0}, scoring | {"max_tokens": 1}, generating):
        httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status()
    assert added(server, before) == (2 * (99 + 9), 4, 4)
