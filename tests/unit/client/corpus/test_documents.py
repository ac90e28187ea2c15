"""A document's figures, whether it is short or long, and what becomes of one that a server refuses."""

import math

import pytest
from fake_server import BOS, MAX_MODEL_LEN, FakeServer, answer, changed, client_of, error, nlls

from scoremode import ResponseError, ServerError
from scoremode.corpus import documents
from scoremode.corpus.documents import Document, DocumentScorer, ScoredDocument, UnscoredDocument, cut_into_requests
from scoremode.runs.pool import Pool
from scoremode.windows import WindowError

CONTEXT = MAX_MODEL_LEN - 1
"""Tokens of the longest document that fits: the prefix token is before it."""


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
    [scored] = await score(answer, "ab")
    assert (scored.num_tokens, scored.nll) == (2, (1 + 6) / 8 + (1 + 27) / 8) == (2, 4.375)
    expected = (math.exp(4.375 / 2), 4.375 / math.log(2) / 2)
    assert (scored.perplexity, scored.bits_per_byte) == pytest.approx(expected)
    [scored] = await score(FakeServer(), "é")
    assert (scored.num_bytes, scored.num_tokens) == (2, 2), "bytes are those of UTF-8"


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
    results = await score(FakeServer(), "short", text, none, "other", per_token=True, context_length=context)
    assert figures(results) == [sum(nlls("short")), sum(nlls(text, context)), none, sum(nlls("other"))]
    assert (results[1].num_tokens, results[1].token_ids) == (length, list(text.encode()))
    assert (-results[1].logprobs).tolist() == nlls(text, context)


async def test_a_refused_document_does_not_cost_its_neighbors():
    results = await score(FakeServer(refused=["broken one"]), "a", "b", "broken one", "c", "d")
    a, b, c, d = (sum(nlls(text)) for text in "abcd")
    assert figures(results) == [a, b, UnscoredDocument("broken (HTTP 400)"), c, d]


async def test_a_document_with_nan_does_not_cost_its_neighbors(waits):
    nan = UnscoredDocument("NaN at position 3 (HTTP 500)")
    broken = error(500, "NaN at position 3")
    results = await score(
        lambda request: broken if b"bad" in request.content else answer(request),
        *("a", "bad", "b", "bad too"),
        retry_for=600,
    )
    assert figures(results) == [sum(nlls("a")), nan, sum(nlls("b")), nan]


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        (lambda request: error(500, "dead") if request.method == "POST" else answer(request), ServerError, "dead"),
        (FakeServer(info={"bos_token_id": None}), WindowError, "neither a BOS nor an EOS token"),
    ],
)
async def test_an_error_that_is_not_the_documents_own_is_raised(server, kind, message):
    with pytest.raises(kind, match=message):
        await score(server, "a")


async def test_answers_that_do_not_fit_are_refused():
    for change in (lambda content: content["data"].clear(), lambda content: content["data"][0].update(num_scored=1)):
        with pytest.raises(ResponseError):
            await score(changed(FakeServer(), "/v1/score", change), "text", per_token=True)


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
