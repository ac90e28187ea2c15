"""What a document's figures are, short or long, and what becomes of one that a server refuses."""

import math
from contextlib import asynccontextmanager

import httpx
import pytest
from document_server import DocumentServer, nlls
from fake_scoremode import BOS, INFO, MAX_MODEL_LEN, answer, error

from scoremode import AsyncScoreClient, ResponseError, ServerError
from scoremode.corpus.documents import Document, DocumentScorer, Scored, Unscored, cut_into_requests
from scoremode.pool import Pool
from scoremode.windows import WindowError

CONTEXT = MAX_MODEL_LEN - 1
"""Tokens of the longest document that fits: the prefix token is before it."""


def document(text):
    return Document(text, len(text.encode()))


@asynccontextmanager
async def scorer_of(handler, retry_for=None, **settings):
    transport = httpx.MockTransport(handler)
    async with AsyncScoreClient("http://a", transport=transport, max_retries=0, retry_for=retry_for) as client:
        yield DocumentScorer(await Pool.connect([client], 2), **settings)


async def score(handler, *texts, **settings):
    async with scorer_of(handler, **settings) as scorer:
        return await scorer.score([text if isinstance(text, Unscored) else document(text) for text in texts])


async def test_figures_worked_out_by_hand():
    # "a" (97) after BOS (256), at 1: (3 * 97 + 5 * 256 + 1) % 29 = 6.
    # "b" (98) after it, at 2: (3 * 98 + 5 * 97 + 2) % 29 = 27.
    [scored] = await score(DocumentServer(), "ab")
    assert scored.num_tokens == 2
    assert scored.nll == (1 + 6) / 8 + (1 + 27) / 8 == 4.375
    assert scored.perplexity == pytest.approx(math.exp(4.375 / 2))
    assert scored.bits_per_byte == pytest.approx(4.375 / math.log(2) / 2)


async def test_bytes_are_those_of_utf8():
    [scored] = await score(DocumentServer(), "é")
    assert scored.num_bytes == 2
    assert scored.bits_per_byte == pytest.approx(sum(nlls("é")) / (2 * math.log(2)))


async def test_documents_that_fit_go_in_one_request_and_come_in_order():
    server = DocumentServer()
    texts = ["one", "three", "two", "x" * CONTEXT]
    results = await score(server, *texts)
    assert [result.nll for result in results] == [sum(nlls(text)) for text in texts]
    assert [body["continuations"] for body in server.score_requests] == [texts]


@pytest.mark.parametrize("length", [CONTEXT + 1, 2 * CONTEXT, 3 * CONTEXT, 3 * CONTEXT + 1, 10 * CONTEXT + 5])
async def test_every_token_of_a_longer_document_is_scored_once_in_rolling_windows(length):
    text = "".join(chr(97 + index % 26) for index in range(length))
    short, long, other = await score(DocumentServer(), "short", text, "other", per_token=True)
    assert long.num_tokens == length
    assert long.nll == sum(nlls(text))
    assert (-long.logprobs).tolist() == nlls(text)
    assert long.token_ids == list(text.encode())
    assert (short.nll, other.nll) == (sum(nlls("short")), sum(nlls("other")))


@pytest.mark.parametrize(
    "text",
    ["The quick brown fox jumps over the lazy dog", "The quick brown fox"],
    ids=["tokenized first", "sent as text"],
)
async def test_windows_may_be_shorter_than_the_model_allows(text):
    [scored] = await score(DocumentServer(), text, context_length=10, per_token=True)
    assert (-scored.logprobs).tolist() == nlls(text, 10) != nlls(text)


async def test_where_tokens_have_many_bytes_a_document_of_many_is_sent_as_text():
    """Here ten bytes stand for each of the server's tokens. Of a context 80 % is taken to fit, 504 bytes."""
    server, fits = DocumentServer(), "x" * 40
    async with scorer_of(server) as scorer:
        first = await scorer.score([Document(fits, 400)])
        assert server.num_tokenized == 1
        assert await scorer.score([Document(fits, 400)]) == first
        assert server.num_tokenized == 1
        # It is too long after all.
        [refused] = await scorer.score([Document("x" * 70, 500)])
        assert (refused.num_tokens, refused.nll) == (70, sum(nlls("x" * 70)))
        assert server.num_tokenized == 2
        await scorer.score([Document(fits, 600)])
        assert server.num_tokenized == 3


async def test_documents_without_text_have_a_reason_and_cost_no_request():
    server = DocumentServer()
    assert await score(server, Unscored("there is no text")) == [Unscored("there is no text")]
    assert server.score_requests == []


async def test_a_document_that_the_server_refuses_does_not_cost_its_neighbours():
    texts = ["a", "b", "broken one", "c", "d"]
    results = await score(DocumentServer(refused=["broken one"]), *texts)
    assert results[2] == Unscored("broken (HTTP 400)")
    assert [result.nll for result in results if isinstance(result, Scored)] == [sum(nlls(text)) for text in "abcd"]


async def test_too_many_tokens_for_one_request_are_asked_for_in_halves():
    server = DocumentServer()

    def small(request):
        if request.method == "POST" and len(request.content) > 150:
            return error(413, "too many tokens")
        return server(request)

    texts = ["some text"] * 20
    assert [result.nll for result in await score(small, *texts)] == [sum(nlls("some text"))] * 20
    assert server.num_scored == 20


async def test_a_document_of_which_a_server_computes_nan_does_not_cost_its_neighbours(waits, caplog):
    server = DocumentServer()

    def handler(request):
        return error(500, "NaN at position 3") if b"bad" in request.content else server(request)

    results = await score(handler, "a", "bad", "b", "bad too", retry_for=600)
    assert results[1] == results[3] == Unscored("NaN at position 3 (HTTP 500)")
    assert [result.nll for result in results if isinstance(result, Scored)] == [sum(nlls(text)) for text in "ab"]
    # A server whose engine dies answers so too, for some seconds: it has had more.
    assert sum(waits) > 5
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_another_error_than_the_documents_own_is_raised():
    def dead(request):
        return error(500, "dead") if request.method == "POST" else answer(request)

    with pytest.raises(ServerError):
        await score(dead, "a")


async def test_a_model_without_a_token_to_begin_with_is_refused():
    def handler(request):
        return httpx.Response(200, json={**INFO, "bos_token_id": None})

    with pytest.raises(WindowError, match="neither a BOS nor an EOS token"):
        await score(handler, "a")


@pytest.mark.parametrize(
    "broken",
    [
        lambda content: {},
        lambda content: {**content, "data": []},
        lambda content: {**content, "data": [{**content["data"][0], "num_scored": 1}]},
        lambda content: {**content, "data": [{**content["data"][0], "logprobs": "AAAA"}]},
        lambda content: {**content, "data": [{**content["data"][0], "logprobs": "no base64"}]},
    ],
    ids=["nothing", "no scores", "too few scored", "three bytes", "no base64"],
)
async def test_answers_that_do_not_fit_are_said_to(broken):
    server = DocumentServer()

    def handler(request):
        response = server(request)
        return httpx.Response(200, json=broken(response.json())) if request.method == "POST" else response

    with pytest.raises(ResponseError):
        await score(handler, "text", per_token=True)


async def test_the_prefix_token_is_asked_for_as_the_server_names_it():
    server = DocumentServer()
    await score(server, "a")
    [body] = server.score_requests
    assert body["prompt"] == [[BOS]]
    assert body["encoding_format"] == "base64"


def test_requests_are_cut_by_bytes_and_by_documents():
    long, short = document("x" * 20_000), document("y")
    assert list(cut_into_requests([])) == []
    assert list(cut_into_requests([long] * 5)) == [(0, 2), (2, 4), (4, 5)]
    assert list(cut_into_requests([short] * 300)) == [(0, 256), (256, 300)]
    assert list(cut_into_requests([Unscored("none"), short])) == [(0, 2)]
