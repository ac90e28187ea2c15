"""`ScoreBatch` as an actor of Ray Data calls it; tests/e2e/test_ray.py has Ray around it."""

import httpx
import numpy as np
import pyarrow as pa
import pytest
from document_server import DocumentServer, nlls
from fake_scoremode import INFO, answer, copy_of, error, serve

from local_server import reserved_port
from scoremode import CorpusError, TransportError
from scoremode.corpus import documents
from scoremode.ray import ScoreBatch

TEXTS = ["hello", "", None, "x" * 300, "last"]


@pytest.fixture
def make():
    made = []

    def make(*urls, **settings):
        made.append(ScoreBatch(urls, retry_for=0, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check(table, prefix=""):
    assert table.column("text").to_pylist() == TEXTS
    scored = [None if not text else sum(nlls(text)) for text in TEXTS]
    assert table.column(f"{prefix}nll").to_pylist() == scored
    assert table.column(f"{prefix}error").to_pylist() == [None, "the text is empty", "there is no text", None, None]


def test_columns_of_a_table(make):
    with serve(DocumentServer()) as url:
        table = pa.table({"text": TEXTS, "row": range(5)})
        scored = make(url, per_token=True)(table)
    check(scored)
    assert scored.select(["text", "row"]).equals(table)
    assert scored.column("token_ids").to_pylist()[0] == list(b"hello")


def test_columns_of_a_numpy_batch_which_is_rays_default(make):
    with serve(DocumentServer()) as url:
        scored = make(url, column_prefix="a_")({"text": np.array(TEXTS, object), "vector": np.zeros((5, 3))})
    check(scored, "a_")
    assert scored.num_columns == 2 + 5


def test_a_slice_of_a_chunked_table(make):
    with serve(DocumentServer()) as url:
        table = pa.concat_tables([pa.table({"text": ["before", *TEXTS[:2]]}), pa.table({"text": TEXTS[2:]})])
        check(make(url)(table.slice(1)))


def test_requests_that_fail_are_a_column_and_the_others_are_kept(make, monkeypatch):
    monkeypatch.setattr(documents, "_REQUEST_BYTES", 1)
    server = DocumentServer()

    def failing(request):
        return copy_of(error(503, "down")) if b'"bad"' in request.content else server(request)

    with serve(failing) as url:
        scored = make(url)(pa.table({"text": ["good", "bad", "fine"]}))
    assert scored.column("nll").to_pylist() == [sum(nlls("good")), None, sum(nlls("fine"))]
    assert scored.column("error").to_pylist() == [None, "down (HTTP 503)", None]


def test_a_server_that_comes_back_is_used_again(make):
    table = pa.table({"text": ["hello"]})
    with reserved_port() as port:
        with serve(DocumentServer(), port) as url:
            score = make(url)
            assert score(table).column("error").to_pylist() == [None]
        for _ in range(2):
            scored = score(table)
            assert scored.column("nll").to_pylist() == [None]
            assert "no answer from" in scored.column("error").to_pylist()[0]
        with serve(DocumentServer(), port):
            assert score(table).column("nll").to_pylist() == [sum(nlls("hello"))]


def test_one_of_two_servers_may_be_lost(make):
    with serve(DocumentServer()) as staying:
        with serve(DocumentServer()) as leaving:
            score = make(leaving, staying)
        check(score(pa.table({"text": TEXTS})))


def test_a_server_that_was_given_up_is_used_again_when_it_answers(make):
    """The one that stays is gone by then: what is scored is scored by the other."""
    table = pa.table({"text": ["hello"]})
    with reserved_port() as port:
        with serve(DocumentServer()) as staying:
            with serve(DocumentServer(), port) as leaving:
                score = make(leaving, staying)
            assert score(table).column("error").to_pylist() == [None]
            other = DocumentServer()
            with serve(other, port):
                for _ in range(4):
                    assert score(table).column("error").to_pylist() == [None]
                assert other.num_scored > 0
        with serve(DocumentServer(), port):
            assert score(table).column("error").to_pylist() == [None]


def test_a_server_that_comes_back_as_another_is_not_used_again(make):
    def another(request):
        if request.method == "GET":
            return httpx.Response(200, json={**INFO, "dtype": "bfloat16"})
        raise AssertionError("asked for scores")

    with reserved_port() as port, serve(DocumentServer()) as staying:
        with serve(DocumentServer(), port) as leaving:
            score = make(leaving, staying)
        check(score(pa.table({"text": TEXTS})))
        with serve(another, port):
            check(score(pa.table({"text": TEXTS})))


def test_what_is_wrong_from_the_start_is_raised(make):
    with pytest.raises(TransportError):
        make("http://127.0.0.1:9")
    with serve(answer) as url:
        score = make(url)
        with pytest.raises(CorpusError, match="no column 'text'"):
            score(pa.table({"body": ["a"]}))
        with pytest.raises(CorpusError, match="has a column 'error' already"):
            score(pa.table({"text": ["a"], "error": ["b"]}))
