"""Corpora of any size by Ray Data: `ScoreBatch` is what `map_batches` runs, on servers that are there already.

import ray
from scoremode.ray import ScoreBatch

ray.data.read_parquet("corpus/").map_batches(
    ScoreBatch,
    fn_constructor_kwargs={"urls": ["http://gpu1:8000", "http://gpu2:8000"]},
    batch_format="pyarrow",
    batch_size=1024,
    compute=ray.data.ActorPoolStrategy(size=2),
).write_parquet("scored/")
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from ray.data.block import BlockAccessor

from scoremode._tasks import joined
from scoremode.client import DEFAULT_TIMEOUT, AsyncScoreClient
from scoremode.corpus.documents import (
    REQUESTS_IN_FLIGHT,
    AnyDocument,
    DocumentResult,
    DocumentScorer,
    UnscoredDocument,
    cut_into_requests,
)
from scoremode.corpus.rows import added_columns, added_schema, check_columns, documents_of
from scoremode.errors import ScoremodeError
from scoremode.runs.pool import Pool

ERROR = "error"


class ScoreBatch:
    """Adds to the rows of a batch the columns that `score_corpus` adds, and `error`, null where all is well.

    An actor has connections of its own, and so many requests in flight; Ray hands it one batch at a time. Two actors or
    more keep servers busy while one of them waits for the end of its batch.

    Args:
        urls: Of one or several servers of the same model.
        text_column: As for `score_corpus`, like `column_prefix` (of `error` too), `per_token` and `context_length`.
        model: As for `ScoreClient`, like `api_key`, `timeout` and `retry_for`; the environment's key is that on the
            actor's machine.
        concurrency: Requests in flight at once at each server, each of some 8,000 tokens.

    Raises:
        WindowError: the model takes no such windows, or has no token to put before a text.
        ScoremodeError: a server does not answer, or the servers differ.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        text_column: str = "text",
        column_prefix: str = "",
        per_token: bool = False,
        context_length: int | None = None,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry_for: float = 600.0,
        concurrency: int = REQUESTS_IN_FLIGHT,
    ) -> None:
        self._text_column = text_column
        self._added = added_schema(column_prefix, per_token=per_token)
        self._error = column_prefix + ERROR
        self._runner = asyncio.Runner()
        self._clients = [
            AsyncScoreClient(url, model=model, api_key=api_key, timeout=timeout, retry_for=retry_for) for url in urls
        ]
        try:
            self._pool = self._runner.run(Pool.connect(self._clients, concurrency))
            self._scorer = DocumentScorer(self._pool, context_length=context_length, per_token=per_token)
        except BaseException:
            self.close()
            raise

    def __call__(self, batch: Mapping[str, Any] | pa.Table) -> pa.Table:
        """Score the rows of a batch of Ray's format "numpy" or "pyarrow".

        Documents that no server gave figures for have `error` instead. CorpusError if the column of texts is missing,
        or an added column's name is taken.
        """
        table = batch if isinstance(batch, pa.Table) else BlockAccessor.batch_to_block(batch)
        check_columns(table.schema, self._text_column, [*self._added.names, self._error], "the batch")
        documents = documents_of(table.column(self._text_column).combine_chunks())
        results = self._runner.run(self._score(documents))
        figures = added_columns(results, self._added)
        for name, column in zip(self._added.names, figures.columns, strict=True):
            table = table.append_column(name, column)
        errors = [result.error if isinstance(result, UnscoredDocument) else None for result in results]
        return table.append_column(self._error, pa.array(errors, pa.string()))

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            self._runner.run(client.close())
        self._runner.close()

    async def _score(self, documents: list[AnyDocument]) -> list[DocumentResult]:
        with self._pool.taking_over():
            parts = await joined(
                self._score_piece(documents[first:last]) for first, last in cut_into_requests(documents)
            )
        return [result for part in parts for result in part]

    async def _score_piece(self, documents: list[AnyDocument]) -> list[DocumentResult]:
        try:
            return await self._scorer.score(documents)
        except ScoremodeError as error:
            return [each if isinstance(each, UnscoredDocument) else UnscoredDocument(str(error)) for each in documents]
