"""From input files to output files: rows are read, scored and written at the same time, and stay in order.

A reader cuts the files into pieces of about one request, and reads the next file while pieces of the last are
scored. A writer takes the pieces in their order. The reader waits while there are many pieces between the two, so
memory does not grow with the files.
"""

import asyncio
import hashlib
import time
from asyncio import Event, Queue, Task
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from scoremode._tasks import in_thread, joined
from scoremode.corpus.documents import DocumentResult, DocumentScorer, UnscoredDocument, cut_into_requests
from scoremode.corpus.filters import check_filter, parse_filter
from scoremode.corpus.output_file import OutputFile, check_finished, journal_of
from scoremode.corpus.rows import added_columns, added_schema, check_columns, documents_of, open_rows
from scoremode.corpus.settings import CorpusProgress, CorpusSettings, InputFile, OnCorpusProgress
from scoremode.errors import OutputError, ScoremodeError
from scoremode.runs.pool import Pool

_PIECES_PER_PLACE = 4
"""Between reader and writer, for each request in flight: one that takes long should not hold up the others."""
_HELD_BYTES = 128 << 20
"""Of rows between reader and writer, unless one piece alone has more."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows, and their figures: of an earlier session, or still being scored."""

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
        settings: CorpusSettings,
        pool: Pool,
        scorer: DocumentScorer,
        *,
        resume: bool,
        on_progress: OnCorpusProgress | None,
    ) -> None:
        self.progress = CorpusProgress(len(files))
        self._files = files
        self._folder = folder
        self._settings = settings
        self._scorer = scorer
        self._on_progress = on_progress
        self._added = added_schema(settings.column_prefix, per_token=settings.per_token)
        self._condition = None if settings.filter is None else parse_filter(settings.filter)
        self._pieces: Queue[_Piece | OutputFile | ScoremodeError | None] = Queue(_PIECES_PER_PLACE * pool.concurrency)
        """An output stands for its end, an error for why no more is read, None for the end of all."""
        self._held = 0
        self._released = Event()
        self._scoring: set[Task[list[DocumentResult]]] = set()
        """Not yet written."""
        self._open: list[OutputFile] = []
        self._started = time.perf_counter()
        for path in () if resume else [folder / file.output_name for file in files]:
            if path.exists() or journal_of(path).exists():
                raise OutputError(f"{path} is there, or was begun: resume with --resume, or choose another folder")

    async def run(self) -> CorpusProgress:
        """Score all files.

        Raises:
            ScoremodeError: the last server failed, a file cannot be read, or an output cannot be written. Finished
                files stay, and the journal of each unfinished one.
        """
        try:
            await joined([self._read(), self._write()])
        finally:
            for scoring in self._scoring:
                scoring.cancel()
            await asyncio.gather(*self._scoring, return_exceptions=True)
            for output in self._open:
                output.abort()
        return self.progress

    async def _read(self) -> None:
        try:
            await self._read_files()
        except ScoremodeError as error:
            await self._pieces.put(error)
        else:
            await self._pieces.put(None)

    async def _read_files(self) -> None:
        for file in self._files:
            opened = await in_thread(self._open_file, file)
            if opened is None:
                self.progress.files_done += 1
                self.progress.num_finished_before += 1
                self._report()
                continue
            batches, output = opened
            while (batch := await in_thread(next, batches, None)) is not None:
                await self._read_batch(output, batch)
            await self._pieces.put(output)

    def _open_file(self, file: InputFile) -> tuple[Iterator[pa.RecordBatch], OutputFile] | None:
        path = self._folder / file.output_name
        header = self._settings.header(file)
        if path.exists():
            check_finished(path, header)
            return None
        schema, batches = open_rows(file.path)
        check_columns(schema, self._settings.text_column, self._added.names, str(file.path))
        if self._condition is not None and schema.names:
            check_filter(self._condition, pa.schema([*schema, *self._added]))
        with file.path.open("rb") as content:
            header["input_sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
        output = OutputFile(path, header, schema, self._added, self._condition)
        self._open.append(output)
        return batches, output

    async def _read_batch(self, output: OutputFile, batch: pa.RecordBatch) -> None:
        earlier = output.take_earlier(batch.num_rows)
        if earlier.num_rows:
            await self._hand_over(_Piece(output, batch.slice(0, earlier.num_rows), 0, earlier=earlier))
        batch = batch.slice(earlier.num_rows)
        documents = documents_of(batch.column(self._settings.text_column))
        for first, last in cut_into_requests(documents):
            rows = batch.slice(first, last - first)
            num_bytes = int(rows.nbytes) + sum(document.num_bytes for document in documents[first:last])
            while self._held and self._held + num_bytes > _HELD_BYTES:
                self._released.clear()
                await self._released.wait()
            scoring = asyncio.create_task(self._scorer.score(documents[first:last]))
            self._scoring.add(scoring)
            await self._hand_over(_Piece(output, rows, num_bytes, scoring=scoring))

    async def _hand_over(self, piece: _Piece) -> None:
        self._held += piece.num_bytes
        await self._pieces.put(piece)

    async def _write(self) -> None:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, ScoremodeError):
                raise piece
            if isinstance(piece, OutputFile):
                await in_thread(piece.finish)
                self._open.remove(piece)
                self.progress.files_done += 1
            else:
                await self._write_piece(piece)
                self._held -= piece.num_bytes
                self._released.set()
            self._report()

    async def _write_piece(self, piece: _Piece) -> None:
        progress, is_new = self.progress, piece.scoring is not None
        figures: pa.RecordBatch | pa.Table = piece.earlier
        if piece.scoring is not None:
            # A failure is raised here, in the order of rows, so that earlier results are kept.
            results = await piece.scoring
            self._scoring.remove(piece.scoring)
            figures = added_columns(results, self._added)
            errors = (result.error for result in results if isinstance(result, UnscoredDocument))
            progress.first_error = progress.first_error or next(errors, None)
        progress.num_kept += await in_thread(piece.output.add, piece.rows, figures, is_new=is_new)
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
