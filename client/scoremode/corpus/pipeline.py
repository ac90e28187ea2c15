"""Reads rows of input files, scores them, and writes them to output files, all at the same time and in order.

Files are cut into pieces of about one request. The next file is read while pieces of the one before are scored. Reading
pauses while too many pieces are unwritten, so memory does not grow with the files.
"""

import asyncio
import hashlib
import time
from asyncio import Task
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from scoremode._tasks import in_thread
from scoremode.corpus.documents import DocumentResult, DocumentScorer, UnscoredDocument, cut_into_requests
from scoremode.corpus.output_file import OutputFile, check_finished, journal_of
from scoremode.corpus.rows import added_columns, added_schema, check_columns, documents_of, open_rows
from scoremode.corpus.settings import CorpusProgress, InputFile, OnCorpusProgress
from scoremode.errors import OutputError, ScoremodeError

_PIECES_PER_REQUEST = 4
"""Unwritten pieces per request in flight, so that a slow request does not hold up the others."""
_HELD_BYTES = 128 << 20
"""Limit on the bytes of unwritten rows; a single piece may exceed it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows, with figures from an earlier session or a task that scores them."""

    output: OutputFile
    rows: pa.RecordBatch
    num_bytes: int
    earlier: pa.Table | None = None
    scoring: Task[list[DocumentResult]] | None = None


class Pipeline:
    def __init__(
        self,
        files: Sequence[InputFile],
        folder: Path,
        settings: dict[str, Any],
        scorer: DocumentScorer,
        *,
        resume: bool,
        on_progress: OnCorpusProgress | None,
    ) -> None:
        self.progress = CorpusProgress(len(files))
        self._files = files
        self._folder = folder
        self._settings = settings
        """Everything that decides an output's rows and figures, except the input file."""
        self._scorer = scorer
        self._on_progress = on_progress
        self._added = added_schema(
            settings["column_prefix"], per_token=settings["per_token"], figures=settings["figures"] or ()
        )
        self._most_pieces = _PIECES_PER_REQUEST * scorer.pool.concurrency
        self._pieces: deque[_Piece | OutputFile | ScoremodeError] = deque()
        """Unwritten pieces. An `OutputFile` marks the end of its file; an error says why reading stopped."""
        self._held = 0
        self._open: list[OutputFile] = []
        self._started = time.perf_counter()
        for path in () if resume else [folder / file.output_name for file in files]:
            if path.exists() or journal_of(path).exists():
                raise OutputError(f"{path} exists or was started: finish it with --resume, or choose another folder")

    async def run(self) -> CorpusProgress:
        """Score all files. After a failure, finished files and the journals of unfinished ones stay."""
        try:
            async with aclosing(self._read()) as pieces:
                async for piece in pieces:
                    self._pieces.append(piece)
                    while len(self._pieces) > self._most_pieces or self._held > _HELD_BYTES:
                        await self._write(self._pieces.popleft())
            while self._pieces:
                await self._write(self._pieces.popleft())
        finally:
            scoring = [piece.scoring for piece in self._pieces if isinstance(piece, _Piece) and piece.scoring]
            for task in scoring:
                task.cancel()
            await asyncio.gather(*scoring, return_exceptions=True)
            for output in self._open:
                output.abort()
        return self.progress

    async def _read(self) -> AsyncGenerator[_Piece | OutputFile | ScoremodeError]:
        try:
            for file in self._files:
                opened = await in_thread(self._open_file, file)
                if opened is None:
                    self.progress.files_done += 1
                    self.progress.num_finished_before += 1
                    self._report()
                    continue
                batches, output = opened
                while (batch := await in_thread(next, batches, None)) is not None:
                    for piece in self._cut(output, batch):
                        yield piece
                yield output
        except ScoremodeError as error:
            # Yield the error, so that `_write` raises it after all rows before it are written.
            yield error

    def _open_file(self, file: InputFile) -> tuple[Iterator[pa.RecordBatch], OutputFile] | None:
        path, size = self._folder / file.output_name, file.path.stat().st_size
        # A flat header, so that an error can name each difference.
        header = {"object": "ppl-client.corpus", "format": 1, "input": file.name, "input_bytes": size, **self._settings}
        if path.exists():
            check_finished(path, header)
            return None
        schema, batches = open_rows(file.path)
        check_columns(schema, self._settings["text_column"], self._added.names, str(file.path))
        with file.path.open("rb") as content:
            header["input_sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
        output = OutputFile(path, header, schema, self._added)
        self._open.append(output)
        return batches, output

    def _cut(self, output: OutputFile, batch: pa.RecordBatch) -> Iterator[_Piece]:
        earlier = output.take_earlier(batch.num_rows)
        if earlier.num_rows:
            yield _Piece(output, batch.slice(0, earlier.num_rows), 0, earlier=earlier)
        batch = batch.slice(earlier.num_rows)
        documents = documents_of(batch.column(self._settings["text_column"]))
        for first, last in cut_into_requests(documents):
            rows = batch.slice(first, last - first)
            num_bytes = int(rows.nbytes) + sum(document.num_bytes for document in documents[first:last])
            self._held += num_bytes
            scoring = asyncio.create_task(self._scorer.score(documents[first:last]))
            yield _Piece(output, rows, num_bytes, scoring=scoring)

    async def _write(self, piece: _Piece | OutputFile | ScoremodeError) -> None:
        if isinstance(piece, ScoremodeError):
            raise piece
        if isinstance(piece, OutputFile):
            await in_thread(piece.finish)
            self._open.remove(piece)
            self.progress.files_done += 1
        else:
            await self._write_piece(piece)
            self._held -= piece.num_bytes
        self._report()

    async def _write_piece(self, piece: _Piece) -> None:
        progress, is_new = self.progress, piece.scoring is not None
        figures: pa.RecordBatch | pa.Table = piece.earlier
        if piece.scoring is not None:
            results = await piece.scoring
            figures = added_columns(results, self._added)
            errors = (result.error for result in results if isinstance(result, UnscoredDocument))
            progress.first_error = progress.first_error or next(errors, None)
        await in_thread(piece.output.add, piece.rows, figures, is_new=is_new)
        num_tokens, nll = (figures.column(place).to_pylist() for place in (0, 1))
        sum_tokens = sum(filter(None, num_tokens))
        progress.num_documents += figures.num_rows
        progress.num_unscored += num_tokens.count(None)
        progress.num_tokens += sum_tokens
        progress.nll += sum(filter(None, nll))
        if not is_new:
            progress.num_resumed += figures.num_rows
            progress.num_tokens_resumed += sum_tokens

    def _report(self) -> None:
        self.progress.seconds = time.perf_counter() - self._started
        if self._on_progress is not None:
            self._on_progress(self.progress)
