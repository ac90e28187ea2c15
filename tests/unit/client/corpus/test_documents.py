"""A document's figures, whether it is short or long, and what becomes of one that a server refuses."""

import math

import pytest
from fake_server import BOS, MAX_MODEL_LEN, FakeServer, changed, client_of, error, nlls

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


def figures(results):
    return [result.nll if isinstance(result, ScoredDocument) else result for result in results]


async def test_figures_are_those_worked_out_by_hand():
    # "a" (97) after BOS (256), at 1: (3 * 97 + 5 * 256 + 1) % 29 = 6.
    # "b" (98) after it, at 2: (3 * 98 + 5 * 97 + 2) % 29 = 27.
    [scored] = await score(FakeServer(), "ab")
    assert (scored.num_tokens, scored.nll) == (2, (1 + 6) / 8 + (1 + 27) / 8) == (2, 4.375)
    expected = (math.exp(4.375 / 2), 4.375 / math.log(2) / 2)
    assert (scored.perplexity, scored.bits_per_byte) == pytest.approx(expected)


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
    results = await score(FakeServer(), "short", text, none, "other", context_length=context)
    assert figures(results) == [sum(nlls("short")), sum(nlls(text, context)), none, sum(nlls("other"))]
    assert (results[1].num_tokens, results[1].token_ids.tolist()) == (length, list(text.encode()))
    assert (-results[1].token_logprobs).tolist() == nlls(text, context)


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
