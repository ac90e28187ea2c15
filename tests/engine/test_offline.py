"""Score mode on a `vllm.LLM`, without a server."""

import numpy as np
import pytest

from scoremode_server import score
from scoremode_server.errors import RequestError
from tests import oracle
from tests.engine.conftest import LENGTH, MAX_LOGPROBS


def test_scores_equal_transformers(llm, random_model):
    generator = np.random.default_rng(1)
    sequences = [generator.integers(3, 400, length).tolist() for length in (LENGTH, 2, 1, 31)]
    scores = score(llm, sequences, top_logprobs=3)
    expected = oracle.logprobs(random_model, [sequence for sequence in sequences if len(sequence) > 1])
    top = oracle.top_logprobs(random_model, [sequences[0]], 3)[0]
    for one, exact in zip((scores[0], scores[1], scores[3]), expected, strict=True):
        oracle.assert_close(one.logprobs[1:], exact)
    assert scores[2].logprobs.shape == (1,)
    assert all(np.isnan(one.logprobs[0]) for one in scores)
    oracle.assert_close(scores[0].top_logprobs[1:], top[1])
    assert np.array_equal(scores[0].ranks[1:], oracle.ranks(random_model, [sequences[0]])[0])


def test_a_text_is_tokenized(llm):
    (of_text,) = score(llm, "one two three")
    (of_tokens,) = score(llm, llm.get_tokenizer().encode("one two three"))
    assert np.array_equal(of_text.logprobs, of_tokens.logprobs, equal_nan=True)


@pytest.mark.parametrize(
    ("prompts", "top_logprobs", "param"),
    [
        ([5] * (LENGTH + 1), 0, "prompt"),
        ([[5, 6], []], 0, "prompt"),
        ([5, 10**6], 0, "prompt"),
        ([5, 6], MAX_LOGPROBS + 1, "top_logprobs"),
    ],
)
def test_bad_input_names_its_field(llm, prompts, top_logprobs, param):
    with pytest.raises(RequestError) as error:
        score(llm, prompts, top_logprobs)
    assert error.value.param == param
