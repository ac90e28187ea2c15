"""Continuations that differ in their last token alone are scored in one pass: compared with transformers in float64,
and by vLLM's count of the tokens that it computed."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from scoremode import ScoreClient
from scoremode.errors import BadRequestError
from tests import oracle
from tests.e2e.test_prefix_reuse import computed_tokens
from tests.shared_servers import BLOCK_SIZE


@pytest.fixture(scope="module")
def tokens(client: ScoreClient, wikitext: str) -> list[int]:
    return client.tokenize(wikitext[66_000:70_000])[:600]


def log_softmax(model: Path, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    return (oracle.logits(model, [*tokens, 0]) / temperature).log_softmax(-1).numpy()


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_with_options_of_their_own_take_one_pass_each(client, server, random_model, tokens, use_cache):
    # The first is shorter than a block, and the second's last row ends a block.
    prompts = [tokens[:5], tokens[:BLOCK_SIZE], tokens[:100], tokens[:101]]
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
    body = {"prompt": prompts, "continuations": options}
    answer = httpx.post(f"{smollm2_server}/v1/score", json=body, timeout=60).raise_for_status().json()
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
def test_longer_options_with_a_shared_beginning(client, random_model, tokens, settings):
    prompt, options = tokens[:90], [[20, 21, 22], [20, 21, 23], [20, 24], [20, 21, 24], [25]]
    temperature = settings.get("temperature", 1.0)
    scores = client.score(prompt, options, **settings)
    for score, option in zip(scores, options, strict=True):
        rows = log_softmax(random_model, prompt + option[:-1], temperature)[len(prompt) - 1 :]
        oracle.assert_close(score.logprobs, rows[range(len(option)), option], scale=1 / temperature)
        assert score.is_greedy == all(rows.argmax(1) == option)
        if settings:
            oracle.assert_close(score.candidate_logprobs, rows[:, [7, 8]], scale=1 / temperature)
            oracle.assert_close(score.top_logprobs.logprobs, -np.sort(-rows)[:, :3], scale=1 / temperature)


def test_ranks_take_a_pass_for_each_option(client, server, random_model, tokens):
    prompt, options = tokens[:70], [[30], [31], [30]]
    before = computed_tokens(server)
    scores = client.score(prompt, options, return_ranks=True, use_cache=False)
    assert computed_tokens(server) - before == 3 * len(prompt)
    for score, option in zip(scores, options, strict=True):
        assert score.ranks == [oracle.ranks(random_model, [prompt + option])[0][-1]]


@pytest.mark.parametrize("num_candidates", [0, 250])
def test_more_options_than_a_pass_has_room_for(client, random_model, tokens, num_candidates):
    prompt, options = tokens[:40], [[option] for option in range(300)]
    candidates = [1] * num_candidates or None
    scores = client.score(prompt, options, candidate_token_ids=candidates)
    oracle.assert_close([score.sum_logprob for score in scores], log_softmax(random_model, prompt)[-1, :300])
    [row] = [log_softmax(random_model, prompt)[-1]]
    assert all(
        set(score.candidate_logprobs[0]) == {np.float32(scores[1].sum_logprob)} for score in scores if candidates
    )
    assert [score.is_greedy for score in scores] == [option == row.argmax() for option in range(300)]


def test_options_end_where_the_context_does(bos_client, byte_fallback_model):
    length = bos_client.info().max_model_len
    prompt = np.random.default_rng(3).integers(3, 400, length - 1).tolist()
    scores = bos_client.score(prompt, [[5], [6]])
    oracle.assert_close([score.sum_logprob for score in scores], log_softmax(byte_fallback_model, prompt)[-1, [5, 6]])
    with pytest.raises(BadRequestError, match=rf"continuations\[1\] after prompt\[0\] has {length + 1} tokens"):
        bos_client.score([prompt], [[[5], [6, 7]]])
