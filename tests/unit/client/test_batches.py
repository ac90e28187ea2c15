"""How many sequences a client sends in one request."""

import json
from types import SimpleNamespace

import pytest

from scoremode.lm_eval.model import MAX_TOKENS, ScoremodeLM
from scoremode.runs import Corpus
from scoremode.runs.conversations import Conversation
from scoremode.runs.plan import _batches
from scoremode.wire import Bounds
from tests import largest_uses as largest


@pytest.mark.parametrize(("length", "most"), [(100, 64), (largest.CONTEXT * 4, 1), (2**18, 3)])
def test_long_conversations_are_rendered_by_requests_of_their_own(length, most):
    conversation = Conversation([{"role": "user", "content": "x" * length}], None)
    corpus = Corpus("a", "", "a", conversations=(conversation,) * 130)
    batches = list(_batches(corpus))
    assert [batches[0][0], *(end for _, end in batches)] == [0, *range(most, 130, most), 130]
    assert max(len(json.dumps(corpus.messages(*batch))) for batch in batches) < Bounds().request_bytes


@pytest.mark.parametrize(
    ("contexts", "continuations", "bound", "num_jobs"),
    [
        # Documents in windows.
        ([[1]], [largest.tokens(2047)] * 2000, 2**24, 63),
        ([largest.tokens(820 + each) for each in range(64)], [[1], [2], [3], [4]], 2**24, 2),
        ([largest.tokens(2000)], [[each] for each in range(20_000)], 2**24, 3),
        ([largest.tokens(2000)], [[1], [2], [3], [4]], 4002, 2),
    ],
)
def test_requests_of_lm_eval_fit_the_bounds(contexts, continuations, bound, num_jobs):
    model, jobs = ScoremodeLM.__new__(ScoremodeLM), []
    model.max_length, model._num_concurrent = 4096, 1
    model._info = SimpleNamespace(bounds=Bounds(scoring_tokens=bound))
    model._run = lambda parts, *_: jobs.extend(parts)
    requests = [(None, context, continuation) for context in contexts for continuation in continuations]
    model._score(requests, print, True)
    places = [place for job in jobs for _, own in job for place in own]
    assert (sorted(places), len(jobs)) == ([*range(len(requests))], num_jobs)
    for job in jobs:
        num_own = sum(len(requests[place][2]) for _, own in job for place in own)
        assert sum(len(context) for context, _ in job) + num_own <= MAX_TOKENS
        assert sum(len(context) * len(own) for context, own in job) + num_own <= bound
