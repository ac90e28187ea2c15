"""`/v1/score` against transformers in float64 on the same weights."""

import math
from pathlib import Path

import numpy as np
import pytest

from scoremode import ScoreClient, perplexity
from tests import oracle

NUM_TOKENS = 768
"""The working memory of the logprobs holds 682 rows."""


@pytest.fixture(scope="module")
def tokens(smollm2_client: ScoreClient, wikitext: str) -> list[int]:
    return smollm2_client.tokenize(wikitext[:6000])[:NUM_TOKENS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, tokens: list[int]) -> np.ndarray:
    """Logprobs of transformers: of the first tokens, too, for none sees those after it."""
    return oracle.logprobs(smollm2, [tokens])[0]


def test_every_logprob_of_a_text_equals_transformers(smollm2_client, tokens, expected):
    (score,) = smollm2_client.score(tokens)
    assert score.logprobs[0] is None
    oracle.assert_close(score.logprobs[1:], expected)
    assert score.num_scored == NUM_TOKENS - 1
    assert score.sum_logprob == math.fsum(score.logprobs[1:])
    nll = -math.fsum(expected) / len(expected)
    assert perplexity(score.nlls).perplexity == pytest.approx(math.exp(nll), rel=oracle.MEAN)


def test_a_token_after_bos_is_within_the_tolerance(smollm2_client):
    tokens, exact = oracle.FIRST_TOKENS
    (score,) = smollm2_client.score(tokens)
    oracle.assert_close(score.logprobs[2:], np.array([exact]))
