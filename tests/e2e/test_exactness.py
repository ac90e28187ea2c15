"""`/v1/score` against transformers in float64 on the same weights, and against stock vLLM on the same server."""

import math
from pathlib import Path

import httpx
import numpy as np
import pytest

from scoremode import ScoreClient, perplexity
from tests import oracle


@pytest.fixture(scope="module")
def tokens(smollm2_client: ScoreClient, wikitext: str) -> list[int]:
    return smollm2_client.tokenize(wikitext[:8000])[:1024]


@pytest.fixture(scope="module")
def expected(smollm2: Path, tokens: list[int]) -> np.ndarray:
    """Logprobs of transformers: of the first tokens, too, for none sees those after it."""
    return oracle.logprobs(smollm2, [tokens])[0]


def test_every_logprob_of_a_text_equals_transformers(
    smollm2_client: ScoreClient, tokens: list[int], expected: np.ndarray
):
    (score,) = smollm2_client.score(tokens)
    assert score.logprobs[0] is None
    oracle.assert_close(score.logprobs[1:], expected)
    assert score.num_scored == 1023
    assert score.sum_logprob == math.fsum(score.logprobs[1:])


def test_a_token_after_bos_is_as_near_as_float32_allows(smollm2_client: ScoreClient):
    tokens, exact = oracle.FIRST_TOKENS
    (score,) = smollm2_client.score(tokens)
    oracle.assert_close(score.logprobs[2:], np.array([exact]))


@pytest.mark.parametrize("length", [256, 1024])
def test_perplexity_equals_transformers(
    smollm2_client: ScoreClient, tokens: list[int], expected: np.ndarray, length: int
):
    (score,) = smollm2_client.score(tokens[:length])
    mean = math.fsum(expected[: length - 1]) / (length - 1)
    assert perplexity(score.nlls).perplexity == pytest.approx(math.exp(-mean), rel=oracle.MEAN)


def test_ranks_and_alternatives_equal_transformers(smollm2_client: ScoreClient, smollm2: Path, tokens: list[int]):
    sequence = tokens[:200]
    (score,) = smollm2_client.score(sequence, top_logprobs=20, return_ranks=True)
    (ranks,) = oracle.ranks(smollm2, [sequence])
    ((ids, logprobs),) = oracle.top_logprobs(smollm2, [sequence], 20)
    assert score.ranks[0] is None
    assert np.isnan(score.top_logprobs.logprobs[0]).all()
    # Float32 rounding may swap two neighbours of nearly equal likelihood, so a few ranks and ids may differ.
    assert np.mean(np.array(score.ranks[1:]) == ranks) > 0.99
    oracle.assert_close(score.top_logprobs.logprobs[1:], logprobs)
    assert np.mean(score.top_logprobs.token_ids[1:] == ids) > 0.99


def test_continuations_equal_the_same_tokens_scored_whole(smollm2_client: ScoreClient, smollm2: Path):
    context, continuations = "The capital of France is", [" Paris", " the city of Lyon", "Ångström"]
    scores = smollm2_client.score(context, continuations)
    start = len(smollm2_client.tokenize(context))
    for score, continuation in zip(scores, continuations, strict=True):
        whole = smollm2_client.tokenize(context + continuation)
        (expected,) = oracle.logprobs(smollm2, [whole])
        (ranks,) = oracle.ranks(smollm2, [whole])
        assert score.token_ids == whole[start:]
        oracle.assert_close(score.logprobs, expected[start - 1 :])
        assert score.ranks == ranks[start - 1 :].tolist()
        assert score.is_greedy == all(rank == 1 for rank in ranks[start - 1 :])


def test_white_space_that_ends_a_context_goes_to_its_continuations(smollm2_client: ScoreClient):
    ended, plain = (
        smollm2_client.score("The capital of France is ", ["Paris"]),
        smollm2_client.score("The capital of France is", [" Paris"]),
    )
    assert [score.token_ids for score in ended] == [score.token_ids for score in plain]


def test_logprobs_equal_stock_vllm_on_the_same_server(
    smollm2_client: ScoreClient, smollm2_server: str, tokens: list[int]
):
    request = {
        "model": "smollm2",
        "prompt": tokens[:700],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
        "temperature": 0,
    }
    stock = httpx.post(f"{smollm2_server}/v1/completions", json=request, timeout=300).raise_for_status().json()
    expected = stock["choices"][0]["logprobs"]["token_logprobs"][:700]
    (score,) = smollm2_client.score(tokens[:700])
    assert expected[0] is None
    assert np.abs(np.array(score.logprobs[1:]) - np.array(expected[1:])).max() <= 1e-6


def test_a_batch_scores_each_sequence_as_if_it_were_alone(
    smollm2_client: ScoreClient, smollm2: Path, tokens: list[int]
):
    sequences = [tokens[start : start + length] for start, length in [(0, 2), (5, 1), (10, 300), (7, 33), (0, 2)]]
    scores = smollm2_client.score(sequences)
    for sequence, score in zip(sequences, scores, strict=True):
        (expected,) = oracle.logprobs(smollm2, [sequence])
        assert score.token_ids == sequence
        assert score.logprobs[0] is None
        oracle.assert_close(score.logprobs[1:], expected)


def test_plain_and_packed_logprobs_are_the_same_numbers(
    smollm2_client: ScoreClient, smollm2_server: str, tokens: list[int]
):
    plain = httpx.post(f"{smollm2_server}/v1/score", json={"prompt": tokens[:100]}, timeout=60).json()["data"][0][
        "logprobs"
    ]
    (packed,) = smollm2_client.score(tokens[:100])
    assert plain[0] is None
    assert np.array_equal(plain[1:], packed.logprobs[1:])
