"""What trainers request of `/v1/score`, compared with transformers: top tokens, candidates, a temperature."""

import math
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from scoremode import ScoreClient
from tests import oracle

LENGTH = 150


@pytest.fixture(scope="module")
def tokens(client: ScoreClient, wikitext: str) -> list[int]:
    """A prompt of the module's own, so that no other test's rows serve it."""
    return client.tokenize(wikitext[20_000:25_000])[:LENGTH]


@pytest.fixture(scope="module")
def logits(random_model: Path, tokens: list[int]) -> torch.Tensor:
    """[n - 1, vocabulary] in float64."""
    return oracle.logits(random_model, tokens)


def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    return (logits / temperature).log_softmax(-1).numpy()


def test_top_logprobs_equal_transformers(client, tokens, logits):
    num_top = 256
    (score,) = client.score(tokens, top_logprobs=num_top)
    expected = log_softmax(logits)
    assert score.top_logprobs.logprobs.shape == (LENGTH, num_top)
    assert (score.top_logprobs.token_ids[0] == -1).all()
    assert np.isnan(score.top_logprobs.logprobs[0]).all()
    ids, logprobs = score.top_logprobs.token_ids[1:], score.top_logprobs.logprobs[1:]
    assert all(len(set(row)) == num_top for row in ids.tolist())
    # By value at each place, since tokens that are equally likely but for rounding may change places.
    oracle.assert_close(logprobs, np.sort(expected)[:, ::-1][:, :num_top])
    oracle.assert_close(logprobs, np.take_along_axis(expected, ids, 1))


def test_candidates_of_each_position(client, tokens, logits):
    chosen = np.random.default_rng(1).integers(0, 1024, (LENGTH, 7))
    (score,) = client.score(tokens, candidate_token_ids=chosen.tolist())
    expected = np.take_along_axis(log_softmax(logits), chosen[1:], 1)
    oracle.assert_close(score.candidate_logprobs[1:], expected)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature(client, tokens, logits, temperature):
    (score,) = client.score(
        tokens, temperature=temperature, top_logprobs=5, candidate_token_ids=[3, 4], return_ranks=True
    )
    expected = log_softmax(logits, temperature)
    # Differences between logits count 1 / T times as much.
    scale = 1 / min(1.0, temperature)
    actual = np.take_along_axis(expected, np.array(tokens[1:])[:, None], 1)[:, 0]
    oracle.assert_close(score.logprobs[1:], actual, scale=scale)
    assert score.sum_logprob == math.fsum(score.logprobs[1:])
    oracle.assert_close(score.candidate_logprobs[1:], expected[:, [3, 4]], scale=scale)
    oracle.assert_close(score.top_logprobs.logprobs[1:], np.sort(expected)[:, ::-1][:, :5], scale=scale)
    (plain,) = client.score(tokens, return_ranks=True)
    assert score.ranks == plain.ranks


@pytest.mark.parametrize("first", [1, 33, LENGTH - 1])
@pytest.mark.parametrize("cached", [False, True])
def test_positions_from_one_on(client, tokens, first, cached):
    (whole,) = client.score(tokens, top_logprobs=3, return_ranks=True)
    (part,) = client.score(tokens, top_logprobs=3, return_ranks=True, logprobs_from=first, use_cache=cached)
    assert part.token_ids == tokens[first:]
    assert part.num_scored == LENGTH - first
    assert part.ranks == whole.ranks[first:]
    oracle.assert_close(part.logprobs, np.array(whole.logprobs[first:]))
    assert np.array_equal(part.top_logprobs.token_ids, whole.top_logprobs.token_ids[first:])


def test_a_batch_with_positions_and_candidates_of_its_own(client, tokens, logits):
    prompts, firsts = [tokens[:40], tokens[:90]], [30, 80]
    chosen = np.random.default_rng(2).integers(0, 1024, (2, 10, 3))
    scores = client.score(prompts, logprobs_from=firsts, candidate_token_ids=chosen.tolist(), temperature=0.9)
    expected = log_softmax(logits, 0.9)
    for score, first, own in zip(scores, firsts, chosen, strict=True):
        rows = expected[first - 1 : first + 9]
        oracle.assert_close(score.candidate_logprobs, np.take_along_axis(rows, own, 1), scale=1 / 0.9)


def test_other_candidates_or_temperatures_have_rows_of_their_own(client, tokens):
    prompt = tokens[:130]
    first = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.5)[0]
    again = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.5)[0]
    other = client.score(prompt, candidate_token_ids=[6, 5], temperature=0.5)[0]
    warmer = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.6)[0]
    oracle.assert_close(again.candidate_logprobs[1:], first.candidate_logprobs[1:], scale=2)
    oracle.assert_close(other.candidate_logprobs[1:], first.candidate_logprobs[1:, ::-1], scale=2)
    assert np.abs(first.candidate_logprobs[1:] - warmer.candidate_logprobs[1:]).max() > 0.1


def test_in_json_a_position_without_context_is_null(server):
    body = {"prompt": [5, 6], "candidate_token_ids": [7, 8], "top_logprobs": 1}
    (result,) = httpx.post(f"{server}/v1/score", json=body, timeout=60).json()["data"]
    assert result["candidate_logprobs"][0] is None
    assert len(result["candidate_logprobs"][1]) == 2
    assert result["top_logprobs"][0] is None


def test_too_large_an_answer_is_refused_before_any_work(server):
    body = {"prompt": [[5] * 2000] * 40, "candidate_token_ids": [7] * 250}
    answer = httpx.post(f"{server}/v1/score", json=body, timeout=60)
    assert answer.status_code == 413
    assert "at most 8388608" in answer.json()["error"]["message"]
