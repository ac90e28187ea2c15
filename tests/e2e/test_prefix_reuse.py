"""Shared prefixes are computed once, for one API key, and no number changes: compared with transformers.

vLLM's own metrics tell what the engine computed, and Scoremode's what was scored. A part of a prompt runs in another
batch shape than the whole.
"""

import httpx

from scoremode import ScoreClient
from tests import oracle
from tests.e2e.metrics import metric
from tests.shared_servers import API_KEY, BLOCK_SIZE, OTHER_API_KEY


def computed_tokens(server: str) -> float:
    """Prompt tokens that the engine has computed so far, by vLLM's count."""
    return metric(server, r'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\}')


def cache_metric(server: str, name: str) -> float:
    return metric(server, rf"scoremode_score_cache_{name}(?:\{{.*\}})?")


def fresh(wikitext: str, client: ScoreClient, place: int, length: int) -> list[int]:
    """Tokens that no other test scores."""
    return client.tokenize(wikitext[40_000 + 3_000 * place :][:4000])[:length]


def test_continuations_share_their_prompt(client, server, random_model, wikitext):
    prompt, endings = fresh(wikitext, client, 2, 250), [[500 + index, 600 + index] for index in range(8)]
    before = computed_tokens(server)
    scores = client.score(prompt, endings, return_ranks=True)
    # The prompt once, and for each other ending the block that it shares only in part.
    assert computed_tokens(server) - before <= 252 + 7 * (BLOCK_SIZE + 2)
    assert cache_metric(server, "bytes") > 0
    wholes = [prompt + ending for ending in endings]
    expected, ranks = oracle.logprobs(random_model, wholes), oracle.ranks(random_model, wholes)
    for score, of_whole, ranks_of_whole in zip(scores, expected, ranks, strict=True):
        oracle.assert_close(score.logprobs, of_whole[-2:])
        assert score.ranks == ranks_of_whole[-2:].tolist()


def test_a_cache_of_no_bytes_holds_nothing(int8_client, int8_server, wikitext):
    tokens = fresh(wikitext, int8_client, 7, 200)
    before = computed_tokens(int8_server)
    (first,), (again,) = int8_client.score(tokens), int8_client.score(tokens)
    assert computed_tokens(int8_server) - before == 2 * 199
    assert first.logprobs == again.logprobs
    assert cache_metric(int8_server, "hits_total") == cache_metric(int8_server, "bytes") == 0


def test_what_one_key_has_scored_is_computed_for_another(plugin_server, byte_fallback_model):
    tokens = [(11 * position + position**2) % 997 for position in range(100)]
    (expected,) = oracle.logprobs(byte_fallback_model, [tokens])
    answers, cached = [], []
    with httpx.Client(base_url=plugin_server, timeout=60) as http:
        for key in (API_KEY, API_KEY, OTHER_API_KEY, OTHER_API_KEY, API_KEY):
            response = http.post("/v1/score", json={"prompt": tokens}, headers={"Authorization": f"Bearer {key}"})
            answers.append(response.json()["data"][0]["logprobs"][1:])
            cached.append(response.json()["usage"]["cached_tokens"])
    assert cached == [0, 96, 0, 96, 96]
    assert answers[2] == answers[0]
    for logprobs in answers:
        oracle.assert_close(logprobs, expected)


def counted(server: str) -> list[float]:
    """Tokens scored, requests that waited, requests that ran."""
    names = ("scored_tokens_total", "request_waiting_seconds_count", "request_running_seconds_count")
    return [metric(server, f"scoremode_{name}") for name in names]


def test_scores_count_with_the_cache_and_without(client, server):
    tokens = client.tokenize("Every way to score a text comes to the same counter in the end. " * 8)[:100]
    before = counted(server)
    client.score([tokens, tokens[:5]])
    client.score(tokens)
    client.score(tokens, use_cache=False)
    client.score(tokens[:50], [tokens[50:53], tokens[60:61]])
    expected = (99 + 4 + 99 + 99 + 52 + 50, 6, 6)
    assert counted(server) == [then + more for then, more in zip(before, expected, strict=True)]
