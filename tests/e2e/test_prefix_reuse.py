"""Shared prefixes are computed once, and no number changes: compared with transformers.

vLLM's own metrics tell what the engine computed. A part of a prompt runs in another batch shape than the whole.
"""

from scoremode import ScoreClient
from tests import oracle
from tests.e2e.metrics import metric
from tests.shared_servers import BLOCK_SIZE


def computed_tokens(server: str) -> float:
    """Prompt tokens that the engine has computed so far, by vLLM's count."""
    return metric(server, r'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\}')


def cache_metric(server: str, name: str) -> float:
    return metric(server, rf"scoremode_score_cache_{name}(?:\{{.*\}})?")


def fresh(wikitext: str, client: ScoreClient, place: int, length: int) -> list[int]:
    """Tokens that no other test scores."""
    return client.tokenize(wikitext[40_000 + 3_000 * place :][:4000])[:length]


def test_a_second_request_computes_only_the_last_block(client, server, random_model, wikitext):
    tokens = fresh(wikitext, client, 0, 400)
    (first,) = client.score(tokens)
    before, hits = computed_tokens(server), cache_metric(server, "hits_total")
    (again,) = client.score(tokens)
    assert computed_tokens(server) - before <= BLOCK_SIZE
    assert cache_metric(server, "hits_total") - hits >= 399 - BLOCK_SIZE
    assert cache_metric(server, "bytes") > 0
    (expected,) = oracle.logprobs(random_model, [tokens])
    for score in (first, again):
        oracle.assert_close(score.logprobs[1:], expected)


def test_continuations_share_their_prompt(client, server, random_model, wikitext):
    prompt, endings = fresh(wikitext, client, 2, 250), [[500 + index, 600 + index] for index in range(8)]
    before = computed_tokens(server)
    scores = client.score(prompt, endings)
    # The prompt once, and for each other ending the block that it shares only in part.
    assert computed_tokens(server) - before <= 252 + 7 * (BLOCK_SIZE + 2)
    expected = oracle.logprobs(random_model, [prompt + ending for ending in endings])
    for score, whole in zip(scores, expected, strict=True):
        oracle.assert_close(score.logprobs, whole[-2:])


def test_a_cache_of_no_bytes_holds_nothing(int8_client, int8_server, wikitext):
    tokens = fresh(wikitext, int8_client, 7, 200)
    before = computed_tokens(int8_server)
    (first,), (again,) = int8_client.score(tokens), int8_client.score(tokens)
    assert computed_tokens(int8_server) - before == 2 * 199
    assert first.logprobs == again.logprobs
    assert cache_metric(int8_server, "hits_total") == cache_metric(int8_server, "bytes") == 0
