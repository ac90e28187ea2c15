"""Options of `/v1/score`, compared with transformers in float64: top tokens, candidates, a temperature, positions.
Continuations that differ in their last token alone are scored in one pass, by vLLM's count of the tokens that it
computed."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from scoremode import BadRequestError, ScoreClient
from tests import oracle
from tests.e2e.test_prefix_reuse import computed_tokens
from tests.shared_servers import BLOCK_SIZE

LENGTH = 150


@pytest.fixture(scope="module")
def long_prompt(client: ScoreClient, wikitext: str) -> list[int]:
    """Tokens of the module's own, so that no other test's rows serve them."""
    return client.tokenize(wikitext[66_000:70_000])[:600]


@pytest.fixture(scope="module")
def tokens(client: ScoreClient, wikitext: str) -> list[int]:
    return client.tokenize(wikitext[20_000:25_000])[:LENGTH]


def log_softmax(model: Path, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """[n, vocabulary] after each token."""
    return (oracle.logits(model, [*tokens, 0]) / temperature).log_softmax(-1).numpy()


@pytest.mark.parametrize(("temperature", "num_top"), [(1.0, 256), (0.5, 5), (2.0, 5)])
def test_top_tokens_candidates_and_ranks_at_a_temperature(client, tokens, random_model, temperature, num_top):
    (score,) = client.score(
        tokens, temperature=temperature, top_logprobs=num_top, candidate_token_ids=[3, 4], return_ranks=True
    )
    expected = log_softmax(random_model, tokens[:-1], temperature)
    # Differences between logits count 1 / T times as much.
    scale = 1 / min(1.0, temperature)
    assert (score.top_logprobs.token_ids[0] == -1).all()
    assert np.isnan(score.top_logprobs.logprobs[0]).all()
    ids, logprobs = score.top_logprobs.token_ids[1:], score.top_logprobs.logprobs[1:]
    assert all(len(set(row)) == num_top for row in ids.tolist())
    # Values are compared at each place, because tokens that are equally likely but for rounding may swap places.
    oracle.assert_close(logprobs, np.sort(expected)[:, ::-1][:, :num_top], scale=scale)
    oracle.assert_close(logprobs, np.take_along_axis(expected, ids, 1), scale=scale)
    oracle.assert_close(score.logprobs[1:], expected[range(LENGTH - 1), tokens[1:]], scale=scale)
    oracle.assert_close(score.candidate_logprobs[1:], expected[:, [3, 4]], scale=scale)
    assert np.mean(np.array(score.ranks[1:]) == oracle.ranks(random_model, [tokens])[0]) > 0.99


@pytest.mark.parametrize("first", [1, 33, LENGTH - 1])
@pytest.mark.parametrize("cached", [False, True])
def test_positions_from_one_on(client, tokens, first, cached):
    (whole,) = client.score(tokens, top_logprobs=3, return_ranks=True)
    (part,) = client.score(tokens, top_logprobs=3, return_ranks=True, logprobs_from=first, use_cache=cached)
    assert (part.token_ids, part.num_scored, part.ranks) == (tokens[first:], LENGTH - first, whole.ranks[first:])
    oracle.assert_close(part.logprobs, np.array(whole.logprobs[first:]))
    assert np.array_equal(part.top_logprobs.token_ids, whole.top_logprobs.token_ids[first:])


def test_a_batch_with_positions_and_candidates_of_its_own(client, tokens, random_model):
    """The first token of a sequence has candidates too, whose logprobs are NaN."""
    prompts, firsts = [tokens[:10], tokens[:90]], [0, 80]
    chosen = np.random.default_rng(2).integers(0, 1024, (2, 10, 3))
    scores = client.score(prompts, logprobs_from=firsts, candidate_token_ids=chosen.tolist(), temperature=0.9)
    expected = log_softmax(random_model, tokens[:-1], 0.9)
    assert np.isnan(scores[0].candidate_logprobs[0]).all()
    for score, first, own in zip(scores, (1, 80), (chosen[0, 1:], chosen[1]), strict=True):
        rows = expected[first - 1 :][: len(own)]
        oracle.assert_close(score.candidate_logprobs[-len(own) :], np.take_along_axis(rows, own, 1), scale=1 / 0.9)


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_with_options_of_their_own_take_one_pass_each(client, server, random_model, long_prompt, use_cache):
    # The first is shorter than a block, and the second's last row ends a block.
    prompts = [long_prompt[:5], long_prompt[:BLOCK_SIZE], long_prompt[:100], long_prompt[:101]]
    expected = [log_softmax(random_model, prompt)[-1] for prompt in prompts]
    best = [int(row.argmax()) for row in expected]
    options = [[[10], [best[0]], [11], [10]], [[best[1]], [12]], [[13]], [[14], [15], [best[3]], [best[3]]]]
    before = computed_tokens(server)
    scores = client.score(prompts, options, use_cache=use_cache)
    if not use_cache:
        assert computed_tokens(server) - before == sum(map(len, prompts))
    pairs = [(prompt, place) for prompt, own in enumerate(options) for place in range(len(own))]
    assert [(score.prompt_index, score.continuation_index) for score in scores] == pairs
    for score, (prompt, place) in zip(scores, pairs, strict=True):
        [token] = options[prompt][place]
        assert (score.token_ids, score.num_scored, score.ranks) == ([token], 1, None)
        oracle.assert_close(score.logprobs, expected[prompt][[token]])
        assert score.is_greedy == (token == best[prompt])


def test_texts_share_passes_where_their_tokens_allow_it(smollm2_client, smollm2_server, smollm2):
    prompts = ["Open the page at http:", "The capital of France is "]
    # "://" is one token.
    options = [[" A", " B", "//www"], ["Paris", "Lyon"]]
    answer = httpx.post(
        f"{smollm2_server}/v1/score", json={"prompt": prompts, "continuations": options}, timeout=60
    ).json()
    wholes = [prompt + option for prompt, own in zip(prompts, options, strict=True) for option in own]
    sequences = [smollm2_client.tokenize(whole) for whole in wholes]
    assert len({tuple(sequence[:-1]) for sequence in sequences}) == 3
    assert answer["usage"]["prompt_tokens"] == sum(len(sequences[index]) for index in (0, 2, 3))
    for result, sequence in zip(answer["data"], sequences, strict=True):
        assert result["token_ids"] == sequence[-len(result["token_ids"]) :]
        [logprobs], [ranks] = oracle.logprobs(smollm2, [sequence]), oracle.ranks(smollm2, [sequence])
        oracle.assert_close(result["logprobs"], logprobs[-len(result["token_ids"]) :])
        assert result["is_greedy"] == all(ranks[-len(result["token_ids"]) :] == 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "candidate_token_ids": [7, 8], "top_logprobs": 3}])
def test_longer_options_with_a_shared_beginning(client, random_model, long_prompt, settings):
    prompt = long_prompt[:90]
    best = int(log_softmax(random_model, prompt)[-1].argmax())
    # Only the last begins with the top token.
    options = [[20, 21, 22], [20, 21, 23], [20, 24], [20, 21, 24], [25], [best, 26]]
    temperature = settings.get("temperature", 1.0)
    scores = client.score(prompt, options, **settings)
    for score, option in zip(scores, options, strict=True):
        rows = log_softmax(random_model, prompt + option[:-1], temperature)[len(prompt) - 1 :]
        oracle.assert_close(score.logprobs, rows[range(len(option)), option], scale=1 / temperature)
        assert score.is_greedy == all(rows.argmax(1) == option)
        if settings:
            oracle.assert_close(score.candidate_logprobs, rows[:, [7, 8]], scale=1 / temperature)
            oracle.assert_close(score.top_logprobs.logprobs, -np.sort(-rows)[:, :3], scale=1 / temperature)


@pytest.mark.parametrize("num_candidates", [0, 250])
def test_more_options_than_a_pass_has_room_for(client, random_model, long_prompt, num_candidates):
    prompt, options = long_prompt[:40], [[option] for option in range(300)]
    scores = client.score(prompt, options, candidate_token_ids=[1] * num_candidates or None)
    row = log_softmax(random_model, prompt)[-1]
    oracle.assert_close([score.sum_logprob for score in scores], row[:300])
    assert [score.is_greedy for score in scores] == [option == row.argmax() for option in range(300)]
    for score in scores if num_candidates else ():
        assert set(score.candidate_logprobs[0]) == {np.float32(scores[1].sum_logprob)}


def test_options_end_where_the_context_does(bos_client, byte_fallback_model):
    length = bos_client.info().max_model_len
    prompt = np.random.default_rng(3).integers(3, 400, length - 1).tolist()
    scores = bos_client.score(prompt, [[5], [6]])
    oracle.assert_close([score.sum_logprob for score in scores], log_softmax(byte_fallback_model, prompt)[-1, [5, 6]])
    with pytest.raises(BadRequestError, match=rf"continuations\[1\] after prompt\[0\] has {length + 1} tokens"):
        bos_client.score([prompt], [[[5], [6, 7]]])
