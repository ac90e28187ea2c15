"""What teachers and policies ask of `/v1/score`, compared with transformers: top tokens, candidates, a temperature."""

import math
from pathlib import Path

import httpx
import numpy as np
import pytest

from scoremode import ScoreClient
from tests import oracle

LENGTH = 150


@pytest.fixture(scope="module")
def tokens(client: ScoreClient, wikitext: str) -> list[int]:
    """A prompt of the module's own, so that no other test's rows serve it."""
    return client.tokenize(wikitext[20_000:25_000])[:LENGTH]


@pytest.fixture(scope="module")
def distributions(random_model: Path, tokens: list[int]) -> np.ndarray:
    """[n - 1, vocabulary] logits in float64."""
    return oracle.logits(random_model, tokens).numpy()


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / temperature
    highest = scaled.max(axis=-1, keepdims=True)
    return scaled - highest - np.log(np.exp(scaled - highest).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("num_top", [50, 128, 256])
def test_top_logprobs_equal_transformers(
    client: ScoreClient, tokens: list[int], distributions: np.ndarray, num_top: int
):
    (score,) = client.score(tokens, top_logprobs=num_top)
    expected = log_softmax(distributions)
    assert score.top_logprobs.logprobs.shape == score.top_logprobs.token_ids.shape == (LENGTH, num_top)
    assert (score.top_logprobs.token_ids[0] == -1).all()
    assert np.isnan(score.top_logprobs.logprobs[0]).all()
    ids, logprobs = score.top_logprobs.token_ids[1:], score.top_logprobs.logprobs[1:]
    assert all(len(set(row)) == num_top for row in ids.tolist())
    # By value at each place, since tokens that are equally likely but for rounding may change places.
    oracle.assert_close(logprobs, np.sort(expected)[:, ::-1][:, :num_top])
    oracle.assert_close(logprobs, np.take_along_axis(expected, ids, 1))


def test_the_same_candidates_at_all_positions(client: ScoreClient, tokens: list[int], distributions: np.ndarray):
    chosen = [0, 17, 17, 1023]
    (score,) = client.score(tokens, candidate_token_ids=chosen)
    assert score.candidate_logprobs.shape == (LENGTH, 4)
    assert np.isnan(score.candidate_logprobs[0]).all()
    oracle.assert_close(score.candidate_logprobs[1:], log_softmax(distributions)[:, chosen])
    (plain,) = client.score(tokens, use_cache=False)
    oracle.assert_close(score.logprobs[1:], np.array(plain.logprobs[1:]))


def test_candidates_of_each_position(client: ScoreClient, tokens: list[int], distributions: np.ndarray):
    chosen = np.random.default_rng(1).integers(0, 1024, (LENGTH, 7))
    (score,) = client.score(tokens, candidate_token_ids=chosen.tolist())
    expected = np.take_along_axis(log_softmax(distributions), chosen[1:], 1)
    oracle.assert_close(score.candidate_logprobs[1:], expected)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 2.0])
def test_a_temperature(client: ScoreClient, tokens: list[int], distributions: np.ndarray, temperature: float):
    (score,) = client.score(
        tokens, temperature=temperature, top_logprobs=5, candidate_token_ids=[3, 4], return_ranks=True
    )
    expected = log_softmax(distributions, temperature)
    # Differences between logits count 1 / T times as much.
    scale = 1 / min(1.0, temperature)
    actual = np.take_along_axis(expected, np.array(tokens[1:])[:, None], 1)[:, 0]
    oracle.assert_close(score.logprobs[1:], actual, scale=scale)
    assert score.sum_logprob == math.fsum(score.logprobs[1:])
    oracle.assert_close(score.candidate_logprobs[1:], expected[:, [3, 4]], scale=scale)
    oracle.assert_close(score.top_logprobs.logprobs[1:], np.sort(expected)[:, ::-1][:, :5], scale=scale)
    (plain,) = client.score(tokens, return_ranks=True)
    assert score.ranks == plain.ranks


@pytest.mark.parametrize("first", [1, 2, 33, 64, LENGTH - 1])
@pytest.mark.parametrize("cached", [False, True])
def test_positions_from_one_on(client: ScoreClient, tokens: list[int], first: int, cached: bool):
    (whole,) = client.score(tokens, top_logprobs=3, return_ranks=True)
    (part,) = client.score(tokens, top_logprobs=3, return_ranks=True, logprobs_from=first, use_cache=cached)
    assert part.token_ids == tokens[first:]
    assert part.num_scored == LENGTH - first
    assert part.ranks == whole.ranks[first:]
    oracle.assert_close(part.logprobs, np.array(whole.logprobs[first:]))
    assert np.array_equal(part.top_logprobs.token_ids, whole.top_logprobs.token_ids[first:])


def test_a_batch_with_positions_and_candidates_of_its_own(
    client: ScoreClient, tokens: list[int], distributions: np.ndarray
):
    prompts, firsts = [tokens[:40], tokens[:90]], [30, 80]
    chosen = np.random.default_rng(2).integers(0, 1024, (2, 10, 3))
    scores = client.score(prompts, logprobs_from=firsts, candidate_token_ids=chosen.tolist(), temperature=0.9)
    expected = log_softmax(distributions, 0.9)
    for score, first, own in zip(scores, firsts, chosen, strict=True):
        rows = expected[first - 1 : first + 9]
        oracle.assert_close(score.candidate_logprobs, np.take_along_axis(rows, own, 1), scale=1 / 0.9)


def test_rows_of_other_candidates_or_temperatures_serve_no_request(client: ScoreClient, tokens: list[int]):
    prompt = tokens[:130]
    first = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.5)[0]
    again = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.5)[0]
    other = client.score(prompt, candidate_token_ids=[6, 5], temperature=0.5)[0]
    warmer = client.score(prompt, candidate_token_ids=[5, 6], temperature=0.6)[0]
    oracle.assert_close(again.candidate_logprobs[1:], first.candidate_logprobs[1:], scale=2)
    oracle.assert_close(other.candidate_logprobs[1:], first.candidate_logprobs[1:, ::-1], scale=2)
    assert np.abs(first.candidate_logprobs[1:] - warmer.candidate_logprobs[1:]).max() > 0.1


def test_continuations_have_candidates_too(client: ScoreClient, distributions: np.ndarray, tokens: list[int]):
    scores = client.score([tokens[:20]], [tokens[20:23], tokens[20:22]], candidate_token_ids=[11, 12])
    expected = log_softmax(distributions)[:, [11, 12]]
    oracle.assert_close(scores[0].candidate_logprobs, expected[19:22])
    oracle.assert_close(scores[1].candidate_logprobs, expected[19:21])


def test_as_floats_a_position_without_context_is_null(server: str):
    body = {"prompt": [5, 6], "candidate_token_ids": [7, 8], "top_logprobs": 1}
    (result,) = httpx.post(f"{server}/v1/score", json=body, timeout=60).json()["data"]
    assert result["candidate_logprobs"][0] is None
    assert len(result["candidate_logprobs"][1]) == 2
    assert result["top_logprobs"][0] is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"candidate_token_ids": []}, "candidate_token_ids", "one or more token ids"),
        ({"candidate_token_ids": [1, 1024]}, "candidate_token_ids", "token id 1024"),
        ({"candidate_token_ids": [-1]}, "candidate_token_ids", "token id -1"),
        ({"candidate_token_ids": [[1], [2]]}, "candidate_token_ids", "2 lists for the 3 positions"),
        ({"candidate_token_ids": [[1], [2], [3, 4]]}, "candidate_token_ids", "as many at each position"),
        ({"candidate_token_ids": [[[1]] * 3] * 2}, "candidate_token_ids", "candidates for 2 prompts"),
        ({"candidate_token_ids": [1] * 257}, "candidate_token_ids", "256 are the most"),
        ({"candidate_token_ids": [[1]], "continuations": [[3]]}, "candidate_token_ids", "with continuations"),
        ({"temperature": 0}, "temperature", "greater than or equal to 0.01"),
        ({"temperature": 1e39}, "temperature", "less than or equal to 1000"),
        ({"logprobs_from": 3}, "logprobs_from", "has 3 tokens"),
        ({"logprobs_from": -1}, "logprobs_from", "positions count from 0"),
        ({"logprobs_from": [0, 1]}, "logprobs_from", "2 positions for 1 prompts"),
        ({"logprobs_from": 1, "continuations": [[3]]}, "logprobs_from", "continuation"),
        ({"top_logprobs": 257}, "top_logprobs", "256"),
    ],
)
def test_bad_requests_name_their_field(server: str, fields: dict[str, object], param: str, message: str):
    answer = httpx.post(f"{server}/v1/score", json={"prompt": [5, 6, 7], **fields}, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_too_large_an_answer_is_refused_before_any_work(server: str):
    body = {"prompt": [[5] * 2000] * 40, "candidate_token_ids": [7] * 250}
    answer = httpx.post(f"{server}/v1/score", json=body, timeout=60)
    assert answer.status_code == 413
    assert "at most 8388608" in answer.json()["error"]["message"]
