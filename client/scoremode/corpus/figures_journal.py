"""The figures of a file that is not finished yet, in a file of their own that outlives the run, should it be killed.

It is a stream of Arrow record batches, each the figures of the rows after those of the batch before. A batch is handed
to the operating system in one piece, so a process that is killed leaves at most one torn batch, the last.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from scoremode.errors import OutputError
from scoremode.runs.journal import AppendedFile, check_same_run, open_locked

HEADER_KEY = b"scoremode"


class FiguresJournal(AppendedFile):
    """The journal of one output file: the figures of earlier sessions, and a place for those of this one."""

    def __init__(self, path: Path, header: Mapping[str, object], schema: pa.Schema) -> None:
        super().__init__(path, open_locked(path))
        self._schema = schema.with_metadata({HEADER_KEY: json.dumps(header)})
        try:
            self._size = self._check(header)
            self.num_resumed = self.num_done
            self._file.truncate(self._size)
            if not self._size:
                self._append(self._schema.serialize())
        except BaseException:
            self._file.close()
            raise

    def earlier(self) -> "_RowsOfBatches":
        """The figures of earlier sessions."""
        return _RowsOfBatches(self._batches() if self.num_resumed else iter(()), self._schema)

    def add(self, figures: pa.RecordBatch) -> None:
        """Write down the figures of the next rows."""
        self._append(figures.serialize())
        self.num_done += figures.num_rows

    def _check(self, header: Mapping[str, object]) -> int:
        """Count the rows that are there; returns the size of the file without a torn end."""
        if not self.path.stat().st_size:
            return 0
        with pa.memory_map(str(self.path)) as source:
            try:
                found = pa.ipc.read_schema(source)
            except (OSError, pa.ArrowException):
                # Torn within the header, or no journal; one that is killed there has no more than that.
                if self.path.stat().st_size <= len(self._schema.serialize()):
                    return 0
                raise OutputError(f"{self.path} is not a journal of this version of ppl-client; move it away") from None
            of_file = json.loads((found.metadata or {}).get(HEADER_KEY, b"{}"))
            check_same_run(self.path, of_file, header, "delete it to start afresh")
            end = int(source.tell())
            while (batch := _next_batch(source, self._schema)) is not None:
                end = int(source.tell())
                self.num_done += batch.num_rows
        return end

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as source:
            pa.ipc.read_schema(source)
            while source.tell() < self._size and (batch := _next_batch(source, self._schema)) is not None:
                yield batch


class _RowsOfBatches:
    """Takes rows off batches, however they are cut."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._rest = schema.empty_table()

    def take(self, num_rows: int) -> pa.Table:
        """The next rows, or as many as there are."""
        while self._rest.num_rows < num_rows and (batch := next(self._batches, None)) is not None:
            self._rest = pa.concat_tables([self._rest, pa.Table.from_batches([batch])])
        taken, self._rest = self._rest.slice(0, num_rows), self._rest.slice(num_rows)
        return taken


def _next_batch(source: pa.NativeFile, schema: pa.Schema) -> pa.RecordBatch | None:
    """The batch that begins here; None unless it is complete."""
    try:
        return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
    except (EOFError, OSError, pa.ArrowException):
        return None
