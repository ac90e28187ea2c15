"""A document's figures, whether it is short or long, and what becomes of one that a server refuses."""

import math

import numpy as np
import pytest
from fake_server import (
    BOS,
    MAX_MODEL_LEN,
    FakeServer,
    changed,
    client_of,
    encoded,
    error,
    nlls,
    rolling_targets,
    statistics_at,
)

from scoremode import ResponseError, ServerError
from scoremode.corpus import documents
from scoremode.corpus.documents import Document, DocumentScorer, ScoredDocument, UnscoredDocument, cut_into_requests
from scoremode.runs import Pool
from scoremode.windows import WindowError

CONTEXT = MAX_MODEL_LEN - 1
"""Tokens of the longest document that fits: the prefix token is before it."""
NAN = error(500, "NaN at position 3")


def document(text):
    return Document(text, len(text.encode()))


async def score(handler, *texts, retry_for=None, **settings):
    documents = [text if isinstance(text, UnscoredDocument) else document(text) for text in texts]
    async with client_of(handler, retry_for=retry_for) as client:
        return await DocumentScorer(await Pool.connect([client], 2), **settings).score(documents)


def with_columns(change):
    """A server whose answers have other columns."""
    return changed(FakeServer(), "/v1/score", lambda content: change(content["data"][0]["columns"]))


def figures(results):
    return [result.nll if isinstance(result, ScoredDocument) else result for result in results]


def older(request):
    """Answer as a server that refuses a field that it does not know."""
    refusal = error(400, "unknown field statistics", param="statistics")
    return refusal if b'"statistics"' in request.content else FakeServer()(request)


async def test_figures_are_those_worked_out_by_hand():
    # "a" (97) after BOS (256), at 1: (3 * 97 + 5 * 256 + 1) % 29 = 6.
    # "b" (98) after it, at 2: (3 * 98 + 5 * 97 + 2) % 29 = 27.
    [scored] = await score(older, "ab", figures=["min_k"])
    assert (scored.num_tokens, scored.nll) == (2, (1 + 6) / 8 + (1 + 27) / 8) == (2, 4.375)
    expected = (math.exp(4.375 / 2), 4.375 / math.log(2) / 2, -28 / 8)
    assert (scored.perplexity, scored.bits_per_byte, scored.min_k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("request_bytes", "texts", "requests"),
    [
        (documents._REQUEST_BYTES, ["one", "three", "x" * CONTEXT], [["one", "three", "x" * CONTEXT]]),
        (4, ["one", "three", "x" * 4 * CONTEXT, "two", "six"], [["one", "three"], ["two", "six"]]),
    ],
)
async def test_documents_that_fit_share_requests_and_keep_their_order(monkeypatch, request_bytes, texts, requests):
    monkeypatch.setattr(documents, "_REQUEST_BYTES", request_bytes)
    server = FakeServer()
    assert figures(await score(server, *texts)) == [sum(nlls(text)) for text in texts]
    asked = [body for body in server.score_requests if "continuations" in body]
    assert [(body["prompt"], body["continuations"], body["encoding_format"]) for body in asked] == [
        ([[BOS]], each, "base64") for each in requests
    ]


@pytest.mark.parametrize("length", [50, CONTEXT + 1, 3 * CONTEXT, 3 * CONTEXT + 1, 10 * CONTEXT + 5])
@pytest.mark.parametrize("context", [CONTEXT, 40])
async def test_every_token_of_a_document_is_scored_once(length, context):
    text = "".join(chr(97 + index % 26) for index in range(length))
    none = UnscoredDocument("the text is null")
    results = await score(FakeServer(), "short", text, none, "other", context_length=context, figures=["entropy"])
    assert figures(results) == [sum(nlls("short")), sum(nlls(text, context)), none, sum(nlls("other"))]
    assert (results[1].num_tokens, results[1].token_ids.tolist()) == (length, list(text.encode()))
    assert (-results[1].token_logprobs).tolist() == nlls(text, context)
    statistics = [[*statistics_at(*target).values()] for target in rolling_targets(text, context)]
    assert results[1].token_scores[1:].T.tolist() == statistics


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeServer(refused=["bad"]), "broken (HTTP 400)"),
        (lambda request: NAN if b"bad" in request.content else FakeServer()(request), "NaN at position 3 (HTTP 500)"),
    ],
    ids=["refused", "NaN"],
)
async def test_a_document_at_fault_does_not_cost_its_neighbors(waits, server, message):
    results = await score(server, "a", "b", "bad", "c", "bad", "d", retry_for=600)
    (a, b, c, d), bad = (sum(nlls(text)) for text in "abcd"), UnscoredDocument(message)
    assert figures(results) == [a, b, bad, c, bad, d]


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        (lambda request: NAN if request.method == "POST" else FakeServer()(request), ServerError, "NaN"),
        (FakeServer(info={"bos_token_id": None}), WindowError, "neither a BOS nor an EOS token"),
    ],
)
async def test_an_error_that_is_not_the_documents_own_is_raised(server, kind, message):
    with pytest.raises(kind, match=message):
        await score(server, "a")


@pytest.mark.parametrize(
    ("scores", "entropy", "min_k", "min_k_plus_plus", "fast_detect"),
    [
        # Logprobs, entropies H and deviations; ln p + H is 0.5, -2.25 and 1. The root of 1 + 2.25 + 3 is 2.5.
        ([[-0.5, -3, -1], [1, 0.75, 2], [1, 1.5, 3**0.5]], 1.25, -3, -1.5, -0.75 / 2.5),
        # A fifth of 9 tokens is one, and of 10 or 14 two. Each token's value is 2 (ln p + 1).
        ([[-2, -5, -9, *[-1] * 6], [1] * 9, [0.5] * 9], 1, -9, -16, -13 / 1.5),
        ([[-2, -5, -9, *[-1] * 7], [1] * 10, [0.5] * 10], 1, -7, -12, -13 / 2.5**0.5),
        ([[-2, -5, -9, *[-1] * 11], [1] * 14, [0.5] * 14], 1, -7, -12, -13 / 3.5**0.5),
        # The only token, rounded; then the less likely of 3/4 and 1/4, for which ln p + H is -3/4 ln 3.
        (
            [[-1e-7, -math.log(4)], [0, math.log(4) - 0.75 * math.log(3)], [0, 3**0.5 / 4 * math.log(3)]],
            (math.log(4) - 0.75 * math.log(3)) / 2,
            -math.log(4),
            -(3**0.5),
            -(3**0.5),
        ),
        # One of two equal tokens, and the only token.
        ([[-math.log(2), 0], [math.log(2), 0], [0, 0]], math.log(2) / 2, -math.log(2), 0, 0),
    ],
    ids=["all differ", "9", "10", "14", "one deviation of 0", "all deviations 0"],
)
def test_figures_of_distributions_are_those_worked_out_by_hand(scores, entropy, min_k, min_k_plus_plus, fast_detect):
    scored = ScoredDocument(1, len(scores[0]), 1.0, np.arange(len(scores[0])), np.array(scores, np.float32))
    found = [scored.entropy, scored.min_k, scored.min_k_plus_plus, scored.fast_detect]
    assert found == pytest.approx([entropy, min_k, min_k_plus_plus, fast_detect], rel=1e-6)


@pytest.mark.parametrize("figure", ["entropy", "min_k++", "fast_detect"])
@pytest.mark.parametrize(
    "server",
    [
        older,
        with_columns(lambda columns: columns.clear()),
        with_columns(lambda columns: columns["std_logprob"].update(shape=[4, 1])),
        with_columns(lambda columns: columns["std_logprob"].update(values=encoded([1, 1, math.nan, 1], "<f4"))),
    ],
    ids=["older", "ignores the field", "wrong shape", "NaN"],
)
async def test_figures_without_statistics_are_refused(server, figure):
    with pytest.raises(ResponseError, match=r"std_logprob, which all figures but min_k need|infinite or NaN"):
        await score(server, "text", figures=[figure])


async def test_answers_that_do_not_fit_are_refused():
    for change in (lambda content: content["data"].clear(), lambda content: content["data"][0].update(num_scored=1)):
        with pytest.raises(ResponseError):
            await score(changed(FakeServer(), "/v1/score", change), "text")


@pytest.mark.parametrize(
    ("cut", "requests"),
    [
        ([], []),
        ([document("x" * 20_000)] * 5, [(0, 2), (2, 4), (4, 5)]),
        ([document("y")] * 300, [(0, 256), (256, 300)]),
        ([UnscoredDocument("none"), document("y")], [(0, 2)]),
    ],
    ids=len,
)
def test_requests_are_cut_by_bytes_and_by_documents(cut, requests):
    assert list(cut_into_requests(cut)) == requests
