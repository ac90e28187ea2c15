"""`/metrics` counts the tokens that were scored and times the requests, through every route that scores."""

import re

import httpx
import pytest

from scoremode import ScoreClient
from tests.e2e.metrics import metrics_of

LOGPROB_BYTES = 256 * 1024**2


def metric(server: str, name: str) -> float:
    """One of our metrics without labels."""
    metrics = metrics_of(server)
    (value,) = re.findall(rf"^scoremode_{name} ([0-9.e+-]+)$", metrics, re.MULTILINE)
    return float(value)


@pytest.fixture
def tokens(client: ScoreClient) -> list[int]:
    return client.tokenize("Every way to score a text comes to the same counter in the end. " * 8)[:100]


def counted(server: str) -> tuple[float, float, float]:
    """(tokens scored, requests that waited, requests that ran)."""
    return (
        metric(server, "scored_tokens_total"),
        metric(server, "request_waiting_seconds_count"),
        metric(server, "request_running_seconds_count"),
    )


def added(server: str, before: tuple[float, float, float]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(counted(server), before, strict=True))


def test_scores_count_with_the_cache_and_without(client: ScoreClient, server: str, tokens: list[int]):
    before = counted(server)
    client.score([tokens, tokens[:5]])
    client.score(tokens)
    client.score(tokens, use_cache=False)
    assert added(server, before) == (99 + 4 + 99 + 99, 4, 4)


def test_continuations_count_with_their_context(client: ScoreClient, server: str, tokens: list[int]):
    before = counted(server)
    client.score(tokens[:50], [tokens[50:53], tokens[60:61]])
    assert added(server, before) == (52 + 50, 2, 2)


def test_perplexity_counts_its_windows(client: ScoreClient, server: str, tokens: list[int]):
    before = counted(server)
    client.perplexity(tokens, method="overlapping", context_length=40, stride=20)
    # [0, 40), [20, 60), [40, 80): the last one that begins before 60.
    assert added(server, before) == (3 * 39, 3, 3)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_completions_that_score_count_their_prompt(server: str, tokens: list[int], max_tokens: int):
    before = counted(server)
    body = {"prompt": [tokens, tokens[:10]], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status()
    assert added(server, before) == (99 + 9, 2, 2)


def test_completions_that_generate_do_not_count(server: str, tokens: list[int]):
    before = counted(server)
    body = {"prompt": tokens, "logprobs": 1, "max_tokens": 2}
    httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status()
    assert added(server, before) == (0, 0, 0)


def test_times_are_seconds_that_passed(client: ScoreClient, server: str, tokens: list[int]):
    names = ("request_waiting_seconds_sum", "request_running_seconds_sum")
    before = [metric(server, name) for name in names]
    response = httpx.post(f"{server}/v1/score", json={"prompt": tokens, "use_cache": False}, timeout=60)
    response.raise_for_status()
    waiting, running = (metric(server, name) - then for name, then in zip(names, before, strict=True))
    assert waiting >= 0
    assert running > 0
    assert waiting + running <= response.elapsed.total_seconds()


def test_the_memory_for_logprobs_is_told(server: str):
    assert metric(server, "logprob_working_bytes") == LOGPROB_BYTES
