"""`/v1/score` against transformers in float64 on the same weights."""

import math

import numpy as np

from tests import oracle

NUM_TOKENS = 768
"""The working memory of the logprobs holds 682 rows."""


def test_every_logprob_of_a_text_equals_transformers(smollm2_client, smollm2, wikitext):
    tokens = smollm2_client.tokenize(wikitext[:6000])[:NUM_TOKENS]
    (expected,) = oracle.logprobs(smollm2, [tokens])
    (score,) = smollm2_client.score(tokens)
    assert score.logprobs[0] is None
    oracle.assert_close(score.logprobs[1:], expected)
    assert score.num_scored == NUM_TOKENS - 1
    assert score.sum_logprob == math.fsum(score.logprobs[1:])


def test_a_token_after_bos_is_within_the_tolerance(smollm2_client):
    tokens, exact = oracle.FIRST_TOKENS
    (score,) = smollm2_client.score(tokens)
    oracle.assert_close(score.logprobs[2:], np.array([exact]))
