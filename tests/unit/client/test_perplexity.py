"""Metrics against figures worked out by hand."""

import math

import pytest

from scoremode.metrics import Perplexity, count_words, perplexity, text_metrics


def test_perplexity_and_its_error_by_hand():
    # NLLs 1, 2, 3: mean 2, sample deviation 1, standard error 1/sqrt(3); the perplexity's is e^2 times that.
    result = perplexity([1.0, 2.0, 3.0])
    assert (result.num_scored, result.nll_sum, result.nll_mean) == (3, 6.0, 2.0)
    assert result.nll_stderr == pytest.approx(0.5773502691896258)
    assert result.perplexity == pytest.approx(7.38905609893065)
    assert result.perplexity_stderr == pytest.approx(4.2660735237846)
    assert perplexity([1e16, 1.0, 1.0]).nll_sum == 1e16 + 2, "no small NLL is lost"
    fair_die = perplexity([math.log(6)] * 4)
    assert (fair_die.perplexity, fair_die.nll_stderr) == (pytest.approx(6, rel=1e-15), pytest.approx(0, abs=1e-12))


def test_one_token_has_no_error_and_may_have_an_infinite_perplexity():
    result = perplexity([9999.0])
    assert (result.nll_stderr, result.perplexity_stderr, result.perplexity) == (None, None, math.inf)
    for nlls, message in (([], "no tokens"), ([1.0, math.nan], "NaN")):
        with pytest.raises(ValueError, match=message):
            perplexity(nlls)


def test_words_are_counted_as_lm_eval_does():
    texts = {"one two  three": 3, " one ": 3, "one\n\ntwo\tthree": 3, "": 1}
    assert {text: count_words(text) for text in texts} == texts


@pytest.mark.parametrize(
    ("method", "text_nll"),
    [("sliding", 30.0), ("rolling", 30.0), ("overlapping", 40.0), ("disjoint", 40.0), ("llama.cpp", 40.0)],
)
def test_a_texts_nll_is_the_sum_or_else_its_tokens_times_the_mean(method, text_nll):
    result = Perplexity(15, 30.0, 2.0, None, math.exp(2), None)
    metrics = text_metrics(result, method, num_tokens=20, num_bytes=100, num_words=10)
    assert metrics.bits_per_byte == pytest.approx(text_nll / 69.31471805599453)
    assert metrics.word_perplexity == pytest.approx(math.exp(text_nll / 10))
    assert text_metrics(result, method, num_tokens=1, num_bytes=0, num_words=1).bits_per_byte is None
