"""Shared prefixes are computed once, and no number changes: compared with transformers and with stock vLLM.

vLLM's own metrics tell what the engine computed. A part of a prompt runs in another batch shape than the whole.
"""

from typing import Any

import pytest

import lm_eval_tasks
from scoremode import ScoreClient
from tests import oracle
from tests.e2e.metrics import metric
from tests.e2e.test_lm_eval import TASK, answers, evaluate
from tests.shared_servers import BLOCK_SIZE

NUM_QUESTIONS = 10  # The examples, which are computed once, weigh little.


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


def test_repeated_perplexity_windows_are_not_computed(client, server, wikitext):
    text = wikitext[80_000:82_000]
    first = client.perplexity(text, context_length=128, stride=64)
    before = computed_tokens(server)
    again = client.perplexity(text, context_length=128, stride=64)
    assert computed_tokens(server) - before < 0.5 * first.num_tokens
    assert again.perplexity == pytest.approx(first.perplexity, rel=oracle.MEAN)


def test_a_cache_of_no_bytes_holds_nothing(int8_client, int8_server, wikitext):
    tokens = fresh(wikitext, int8_client, 7, 200)
    before = computed_tokens(int8_server)
    (first,), (again,) = int8_client.score(tokens), int8_client.score(tokens)
    assert computed_tokens(int8_server) - before == 2 * 199
    assert first.logprobs == again.logprobs
    assert cache_metric(int8_server, "hits_total") == cache_metric(int8_server, "bytes") == 0


def test_lm_eval_computes_each_shared_prefix_once(server, random_model, tmp_path):
    """Stock vLLM's completions compute every prompt whole."""
    lm_eval_tasks.write_tasks(tmp_path, None)

    def run(route: str) -> tuple[dict[str, Any], float]:
        before = computed_tokens(server)
        arguments = {
            "model": "tiny",
            "base_url": f"{server}{route}",
            # There is no remote tokenizer under /stock.
            "tokenizer_backend": "huggingface",
            "tokenizer": str(random_model),
            "num_concurrent": 4,
            "max_length": 1024,
        }
        results = evaluate(tmp_path, "local-completions", arguments, TASK, limit=NUM_QUESTIONS)
        return results, computed_tokens(server) - before

    (cached, computed), (uncached, computed_without) = run("/v1/completions"), run("/stock/v1/completions")
    pairs = zip(answers(cached, TASK), answers(uncached, TASK), strict=True)
    for (ours, is_greedy), (expected, is_expected_greedy) in pairs:
        assert ours == pytest.approx(expected, abs=oracle.PER_TOKEN)
        assert is_greedy == is_expected_greedy
    assert computed_without / computed >= 3
