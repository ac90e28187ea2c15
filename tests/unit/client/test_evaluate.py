"""Evaluations against a server whose log-probabilities are known: every figure is worked out anew here."""

import math

import pytest
from fake_server import BOS, FakeServer, changed, client_of, encoded, logprob

from scoremode import METHODS, ResponseError, cut_windows
from scoremode.metrics import TextMetrics
from scoremode.runs import Corpus, evaluate

TEXT = "The quick brown fox jumps over the lazy dog, and on it goes."


async def run(server=None, **settings):
    async with client_of(server or FakeServer()) as client:
        return await evaluate(client, Corpus("fox", TEXT, "made up", 1), **settings)


def nlls_of(tokens: list[int], method: str, stride: int | None) -> list[list[float]]:
    """The NLLs of the targets of each window of 8 tokens."""
    windows = cut_windows(len(tokens), method, 8, stride, prefix_token_id=BOS, bos_token_id=BOS)
    sequences = [(window.token_ids(tokens), window.first_scored) for window in windows]
    return [[-logprob(tokens, position) for position in range(first, len(tokens))] for tokens, first in sequences]


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_gives_the_figures_of_its_definition(method):
    steps, stride = [], 3 if method in ("sliding", "overlapping") else None
    evaluation = await run(method=method, context_length=8, stride=stride, concurrency=3, on_progress=steps.append)
    tokens = list(TEXT.encode()) if method == "rolling" else [BOS, *TEXT.encode()]
    expected = nlls_of(tokens, method, stride)
    assert [window.nlls for window in evaluation.windows] == expected
    assert evaluation.windows[0].ranks is None
    flat, plan = [nll for window in expected for nll in window], evaluation.plan
    mean = sum(flat) / len(flat)
    assert [step.windows_done for step in steps] == list(range(1, len(expected) + 1))
    figures = (len(flat), pytest.approx(math.exp(mean), rel=1e-12))
    assert [(each.num_scored, each.perplexity) for each in (evaluation.result, steps[-1])] == [figures, figures]
    text_nll = sum(flat) if method in ("sliding", "rolling") else mean * len(tokens)
    assert evaluation.text_metrics == TextMetrics(
        pytest.approx(text_nll / math.log(2) / len(TEXT)), pytest.approx(math.exp(text_nll / 13))
    )
    assert (len(plan.tokens), plan.num_bytes, plan.num_words) == (len(tokens), len(TEXT), 13)


async def test_max_tokens_cuts_the_text_whose_bytes_and_words_are_counted():
    plan = (await run(max_tokens=10, context_length=8, stride=3)).plan
    assert (len(plan.tokens), plan.num_words) == (10, 2)
    assert plan.num_bytes == len("The quick"), "nine bytes after BOS, which is not part of the text"
    whole, limited = await run(context_length=8), await run(context_length=8, max_tokens=1000)
    assert (limited.windows, limited.plan.num_bytes) == (whole.windows, whole.plan.num_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1] * 8}, "did not score the tokens"),
        ({"logprobs": encoded([math.nan] * 8, "<f4")}, "0 of the 7 there"),
        ({"ranks": [None] * 8}, "0 ranks for the 7"),
    ],
)
async def test_scores_that_do_not_fit_the_window_are_not_summed(change, message):
    server = changed(FakeServer(), "/v1/score", lambda content: content["data"][0].update(change))
    with pytest.raises(ResponseError, match=message):
        await run(server, context_length=8, return_ranks=True, concurrency=1)
