"""`ScoreBatch` as an actor of Ray Data calls it; tests/e2e/test_corpus.py has Ray around it."""

from contextlib import ExitStack, closing

import numpy as np
import pyarrow as pa
import pytest
from fake_server import FakeServer, error, nlls, serve

from scoremode import CorpusError, TransportError
from scoremode.corpus import documents
from scoremode.ray import ScoreBatch

TEXTS = ["hello", "", None, "x" * 300, "last"]
FIGURES = (
    [sum(nlls("hello")), None, None, sum(nlls("x" * 300)), sum(nlls("last"))],
    [None, "the text is empty", "the text is null", None, None],
)


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda *urls, **settings: stack.enter_context(closing(ScoreBatch(urls, retry_for=0, **settings)))


def figures(table, prefix=""):
    return tuple(table.column(f"{prefix}{name}").to_pylist() for name in ("nll", "error"))


def test_tables_and_numpy_batches_get_columns(make):
    """Ray's default is numpy batches."""
    table = pa.table({"text": TEXTS, "row": range(5)})
    with serve(FakeServer()) as url:
        scored = make(url, per_token=True)(table)
        of_numpy = make(url, column_prefix="a_")({"text": np.array(TEXTS, object), "vector": np.zeros((5, 3))})
    assert scored.select(["text", "row"]).equals(table)
    assert scored.column("token_ids").to_pylist()[0] == list(b"hello")
    assert figures(scored) == figures(of_numpy, "a_") == FIGURES


def test_failed_requests_are_a_column_and_the_others_are_kept(make, monkeypatch):
    monkeypatch.setattr(documents, "_REQUEST_BYTES", 1)
    server = FakeServer()

    def failing(request):
        return error(503, "down") if b'"bad"' in request.content else server(request)

    with serve(failing) as url:
        scored = make(url)(pa.table({"text": ["good", "bad", "fine"]}))
    assert figures(scored) == ([sum(nlls("good")), None, sum(nlls("fine"))], [None, "down (HTTP 503)", None])


def test_the_servers_that_are_left_score_on(make):
    with serve(FakeServer()) as staying:
        with serve(FakeServer()) as leaving:
            score = make(leaving, staying)
        assert figures(score(pa.table({"text": TEXTS}))) == FIGURES
    for _ in range(2):
        [nll], [message] = figures(score(pa.table({"text": ["Hello"]})))
        assert (nll, "no answer from" in message) == (None, True)


def test_wrong_servers_and_columns_are_refused_at_once(make):
    with pytest.raises(TransportError):
        make("http://127.0.0.1:9")
    with serve(FakeServer()) as url:
        score = make(url)
        with pytest.raises(CorpusError, match="no column 'text'"):
            score(pa.table({"body": ["a"]}))
        with pytest.raises(CorpusError, match="has a column 'error' already"):
            score(pa.table({"text": ["a"], "error": ["b"]}))
