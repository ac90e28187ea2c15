"""Shared prefixes are computed once, and no number changes: beside transformers, beside stock vLLM, and without cache.

What the engine computed is read from vLLM's own metrics. A part of a prompt runs in another batch shape than the whole.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import lm_eval_tasks
from scoremode import AsyncScoreClient, ScoreClient
from tests import oracle
from tests.e2e.metrics import metrics_of
from tests.e2e.test_lm_eval import TASK, answers, evaluate
from tests.shared_servers import BLOCK_SIZE

COMPUTED = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="local_compute"\} ([0-9.e+]+)$', re.MULTILINE)
NUM_QUESTIONS = 10
"""So many that the examples, which are computed once, weigh little."""


def computed_tokens(server: str) -> float:
    """Prompt tokens that the engine has computed so far, by vLLM's count."""
    return sum(map(float, COMPUTED.findall(metrics_of(server))))


def metric(server: str, name: str) -> float:
    pattern = rf"^scoremode_score_cache_{name}(?:\{{.*\}})? ([0-9.e+]+)$"
    found = re.findall(pattern, metrics_of(server), re.MULTILINE)
    return sum(map(float, found))


def fresh(wikitext: str, client: ScoreClient, place: int, length: int) -> list[int]:
    """Tokens that no other test scores."""
    return client.tokenize(wikitext[40_000 + 3_000 * place :][:4000])[:length]


def test_the_second_time_only_the_last_block_is_computed(
    client: ScoreClient, server: str, random_model: Path, wikitext: str
):
    tokens = fresh(wikitext, client, 0, 400)
    (first,) = client.score(tokens)
    before = computed_tokens(server)
    (again,) = client.score(tokens)
    assert computed_tokens(server) - before <= BLOCK_SIZE
    (expected,) = oracle.logprobs(random_model, [tokens])
    for score in (first, again):
        oracle.assert_close(score.logprobs[1:], expected)


def test_ranks_and_alternatives_come_from_the_cache_too(client: ScoreClient, server: str, wikitext: str):
    tokens = fresh(wikitext, client, 1, 300)
    (first,) = client.score(tokens, top_logprobs=5, return_ranks=True)
    before = computed_tokens(server)
    (fewer,) = client.score(tokens, top_logprobs=2, return_ranks=True)
    assert computed_tokens(server) - before <= BLOCK_SIZE
    assert np.mean(np.array(fewer.ranks[1:]) == first.ranks[1:]) > 0.99
    before = computed_tokens(server)
    client.score(tokens, top_logprobs=9)
    assert computed_tokens(server) - before >= 299 - BLOCK_SIZE, "more alternatives than are held are computed anew"


def test_continuations_share_their_prompt(client: ScoreClient, server: str, random_model: Path, wikitext: str):
    prompt, endings = fresh(wikitext, client, 2, 250), [[500 + index, 600 + index] for index in range(8)]
    before = computed_tokens(server)
    scores = client.score(prompt, endings)
    # The prompt once, and for each other ending the block that it shares only in part.
    assert computed_tokens(server) - before <= 252 + 7 * (BLOCK_SIZE + 2)
    expected = oracle.logprobs(random_model, [prompt + ending for ending in endings])
    for score, whole in zip(scores, expected, strict=True):
        oracle.assert_close(score.logprobs, whole[-2:])


def test_usage_tells_what_was_not_computed(client: ScoreClient, server: str, wikitext: str):
    tokens = fresh(wikitext, client, 3, 200)

    def cached(**options: Any) -> int:
        usage = httpx.post(f"{server}/v1/score", json={"prompt": tokens, **options}, timeout=60).json()["usage"]
        return int(usage["cached_tokens"])

    assert cached() == 0
    assert cached() == 192
    assert cached(use_cache=False) == 0


def test_requests_in_flight_share_work(server: str, client: ScoreClient, random_model: Path, wikitext: str):
    prompt = fresh(wikitext, client, 4, 500)
    sequences = [[*prompt, 700 + index] for index in range(4)]
    before = computed_tokens(server)

    async def all_at_once() -> list[Any]:
        async with AsyncScoreClient(server, timeout=300) as asynchronous:
            return await asyncio.gather(*(asynchronous.score(sequence) for sequence in sequences))

    scores = asyncio.run(all_at_once())
    assert computed_tokens(server) - before <= 500 + 3 * (BLOCK_SIZE + 1)
    for (score,), expected in zip(scores, oracle.logprobs(random_model, sequences), strict=True):
        oracle.assert_close(score.logprobs[1:], expected)


def test_completions_take_their_echo_from_the_cache(client: ScoreClient, server: str, wikitext: str):
    tokens = fresh(wikitext, client, 5, 300)
    body = {"prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    before = computed_tokens(server)
    again = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    assert computed_tokens(server) - before <= BLOCK_SIZE
    assert again["tokens"] == first["tokens"]
    oracle.assert_close(again["token_logprobs"][1:], first["token_logprobs"][1:])
    assert [list(entry) for entry in again["top_logprobs"][1:]] == [list(entry) for entry in first["top_logprobs"][1:]]


def test_perplexity_windows_that_come_again_are_not_computed(client: ScoreClient, server: str, wikitext: str):
    text = wikitext[80_000:82_000]
    first = client.perplexity(text, context_length=128, stride=64)
    before = computed_tokens(server)
    again = client.perplexity(text, context_length=128, stride=64)
    assert computed_tokens(server) - before < 0.5 * first.num_tokens
    assert again.perplexity == pytest.approx(first.perplexity, rel=oracle.MEAN)


def test_metrics_tell_of_the_cache(client: ScoreClient, server: str, wikitext: str):
    tokens = fresh(wikitext, client, 6, 200)
    client.score(tokens)
    hits, held = metric(server, "hits_total"), metric(server, "bytes")
    client.score(tokens)
    assert metric(server, "hits_total") > hits
    assert held > 0
    for name in ("misses_total", "evictions_total", "joined_total"):
        assert metric(server, name) >= 0


def test_a_cache_of_no_bytes_keeps_nothing(int8_client: ScoreClient, int8_server: str, wikitext: str):
    tokens = fresh(wikitext, int8_client, 7, 200)
    before = computed_tokens(int8_server)
    (first,), (again,) = int8_client.score(tokens), int8_client.score(tokens)
    assert computed_tokens(int8_server) - before == 2 * 199
    assert first.logprobs == again.logprobs
    assert metric(int8_server, "hits_total") == metric(int8_server, "bytes") == 0


def test_lm_eval_computes_each_shared_prefix_once(server: str, random_model: Path, tmp_path: Path):
    """Beside stock vLLM's completions, which compute every prompt whole."""
    lm_eval_tasks.write_tasks(tmp_path, None)

    def run(route: str) -> tuple[dict[str, Any], float]:
        before = computed_tokens(server)
        arguments = {
            "model": "tiny",
            "base_url": f"{server}{route}",
            # Stock vLLM's route has no remote tokenizer beside it.
            "tokenizer_backend": "huggingface",
            "tokenizer": str(random_model),
            "num_concurrent": 4,
            "max_length": 1024,
        }
        results = evaluate(tmp_path, "local-completions", arguments, (TASK,), limit=NUM_QUESTIONS)
        return results, computed_tokens(server) - before

    (cached, computed), (uncached, computed_without) = run("/v1/completions"), run("/stock/v1/completions")
    for (ours, is_greedy), (expected, expected_greedy) in zip(
        answers(cached, TASK), answers(uncached, TASK), strict=True
    ):
        assert ours == pytest.approx(expected, abs=oracle.PER_TOKEN)
        assert is_greedy == expected_greedy
    for name in ("acc,none", "acc_norm,none"):
        assert cached["results"][TASK][name] == uncached["results"][TASK][name]
    assert computed_without / computed >= 3
