"""Windows and perplexity: hand-worked examples, lm-eval's function, and the loop of Hugging Face's documentation as
`tests/window_loops.py` has it."""

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows

from scoremode.metrics import count_words, perplexity
from scoremode.windows import Window, WindowError, cut_windows, resolve_context_length, resolve_stride, turn_prompts
from tests.window_loops import fixed_length_loop

BOS = 999

lengths = st.integers(min_value=0, max_value=120)
contexts = st.integers(min_value=2, max_value=20)


Asked = tuple[list[int], int]
"""A question to a model: the tokens before a target in its window, and the target."""


def asked(window: list[int]) -> list[Asked]:
    """The questions for all tokens of a window but its first."""
    return [(window[:i], window[i]) for i in range(1, len(window))]


def conditioned_targets(windows: list[Window], num_tokens: int) -> list[Asked]:
    """For the targets of the windows, in order."""
    text = list(range(num_tokens))
    return [each for window in windows for each in asked(window.token_ids(text))[window.first_scored - 1 :]]


def lm_eval_rolling(num_tokens: int, max_sequence: int, prefix: int) -> list[Asked]:
    """Fed to lm-eval's model: a context, of which the last len(continuation) positions predict the continuation."""
    windows = get_rolling_token_windows(list(range(num_tokens)), prefix, max_sequence, 1)
    return [each for context, predicted in windows for each in asked([*context, predicted[-1]])[-len(predicted) :]]


@given(lengths, contexts, st.data())
def test_sliding_is_hugging_faces_loop(num_tokens, context_length, data):
    stride = data.draw(st.integers(min_value=1, max_value=context_length))
    windows = cut_windows(num_tokens, "sliding", context_length, stride)
    expected = fixed_length_loop(asked, list(range(num_tokens)), context_length, stride)
    assert conditioned_targets(windows, num_tokens) == list(chain.from_iterable(expected))


@given(lengths, contexts)
def test_rolling_is_lm_evals(num_tokens, context_length):
    windows = cut_windows(num_tokens, "rolling", context_length, prefix_token_id=BOS)
    assert conditioned_targets(windows, num_tokens) == lm_eval_rolling(num_tokens, context_length, BOS)


def test_overlapping_scores_all_targets_of_full_windows():
    assert cut_windows(9, "disjoint", 4) == [Window(0, 4, 1), Window(4, 8, 5)]
    # Starts 0, 2, 4 are below 10 - 4; a window at 6 would end with the text and is not taken.
    assert cut_windows(10, "overlapping", 4, 2) == [Window(0, 4, 1), Window(2, 6, 3), Window(4, 8, 5)]
    # The counts of scripts compatible with EXL3.
    windows = cut_windows(2048 + 72 * 512 + 1, "overlapping", 2048, 512)
    assert (len(windows), sum(window.num_scored for window in windows)) == (73, 149_431)


def test_llama_cpp_scores_the_second_half_of_whole_chunks():
    # Positions 5, 6 and 7 of 8 count; two tokens are left over.
    assert cut_windows(18, "llama.cpp", 8) == [Window(0, 8, 5), Window(8, 16, 13)]
    # BOS replaces the first token of each.
    windows = cut_windows(16, "llama.cpp", 8, bos_token_id=BOS)
    assert [each.token_ids(range(16)) for each in windows] == [[BOS, *range(1, 8)], [BOS, *range(9, 16)]]
    assert (windows[1].first_scored, windows[1].num_scored) == (5, 3)


def test_a_turns_prompt_is_what_follows_the_turn_before():
    """A conversation, whose third turn is rendered without what the second thought (8), and another."""
    turns = [(0, [1, 2, 5, 6], 2), (0, [1, 2, 5, 6, 3, 8, 7], 5), (0, [1, 2, 5, 6, 3, 7, 4, 5], 7), (1, [1, 2, 5], 2)]
    assert turn_prompts(turns) == [[1, 2], [3], [7, 4], [1, 2]]


@pytest.mark.parametrize(
    ("method", "context_length", "stride", "field"),
    [
        *(("sliding", 4, 5, "stride"), ("sliding", 4, 0, "stride"), ("disjoint", 4, 2, "stride")),
        *(("sliding", 1, None, "context_length"), ("rolling", 4, None, "method")),
    ],
)
def test_impossible_windows_name_the_field_at_fault(method, context_length, stride, field):
    with pytest.raises(WindowError) as caught:
        cut_windows(10, method, context_length, stride)
    assert caught.value.field == field


def test_the_default_length_and_stride_fit_the_model_and_the_method():
    # Rolling feeds one token more than it predicts.
    cases = (("sliding", 4096), ("sliding", 1024), ("rolling", 1024))
    assert [resolve_context_length(method, None, longest) for method, longest in cases] == [2048, 1024, 1023]
    with pytest.raises(WindowError, match=r"1025.*1024") as caught:
        resolve_context_length("rolling", 1024, 1024)
    assert caught.value.field == "context_length"
    # A quarter of it, where windows overlap.
    cases = (("sliding", 2048), ("overlapping", 3), ("disjoint", 2048))
    assert [resolve_stride(method, length, None) for method, length in cases] == [512, 1, 2048]


def test_perplexity_and_its_error_by_hand():
    # NLLs 1, 2, 3: mean 2, sample deviation 1, standard error 1/sqrt(3); the perplexity's is e^2 times that.
    result = perplexity([1.0, 2.0, 3.0])
    assert (result.num_scored, result.nll_sum, result.nll_mean) == (3, 6.0, 2.0)
    figures = (result.nll_stderr, result.perplexity, result.perplexity_stderr)
    assert figures == pytest.approx((0.5773502691896258, 7.38905609893065, 4.2660735237846))
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
