"""Writes one file's rows with their added columns, to a parquet file that appears whole or not at all.

Until then a journal stores the figures, in case the run is killed. It is a stream of Arrow record batches, in the order
of the rows. A batch is handed to the operating system in one piece, so a killed process tears at most the last batch.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scoremode.errors import OutputError, file_errors
from scoremode.runs import AppendedFile, check_same_run, sync_folder

HEADER_KEY = b"scoremode"
_ROW_GROUP_BYTES = 64 << 20
_ROW_GROUP_ROWS = 65_536


def journal_of(path: Path) -> Path:
    """The journal's path. It is hidden, so that readers of the folder as a dataset skip it."""
    return path.with_name(f".{path.name}.journal")


class FiguresJournal(AppendedFile):
    """The journal of one output file: it has the figures of earlier sessions, and those of this one are added."""

    def __init__(self, path: Path, header: Mapping[str, object], schema: pa.Schema) -> None:
        super().__init__(path)
        schema = schema.with_metadata({HEADER_KEY: json.dumps(header)})
        try:
            size, batches = self._read(header, schema) if path.stat().st_size else (0, [])
            self._file.truncate(size)
            if not size:
                self._append(schema.serialize())
        except BaseException:
            self._file.close()
            raise
        self.earlier = pa.Table.from_batches(batches, schema)
        """The figures of earlier sessions: the file's own bytes, mapped into memory."""
        self.num_done = self.earlier.num_rows

    def add(self, figures: pa.RecordBatch) -> None:
        self._append(figures.serialize())
        self.num_done += figures.num_rows

    def _read(self, header: Mapping[str, object], schema: pa.Schema) -> tuple[int, list[pa.RecordBatch]]:
        """Return the size of the file without a torn end, and its batches."""
        batches: list[pa.RecordBatch] = []
        with pa.memory_map(str(self.path)) as source:
            try:
                own_header = json.loads((pa.ipc.read_schema(source).metadata or {}).get(HEADER_KEY, b"{}"))
            except (OSError, ValueError, RecursionError, pa.ArrowException):
                # A run that was killed while it wrote the header left no more bytes than a header has.
                if source.size() <= len(schema.serialize()):
                    return 0, batches
                raise OutputError(f"{self.path} is not a journal of this version of ppl-client; move it away") from None
            check_same_run(self.path, own_header, header, "delete it to start afresh")
            while True:
                end = int(source.tell())
                try:
                    batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(source), schema))
                except (EOFError, OSError, pa.ArrowException):
                    return end, batches


class OutputFile:
    """Takes rows and their figures in order, until `finish` puts the file in its place.

    The file keeps `header`: everything that decides its rows and figures.
    """

    def __init__(self, path: Path, header: Mapping[str, object], rows: pa.Schema, added: pa.Schema) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._journal = FiguresJournal(journal_of(path), header, added)
        self._earlier = self._journal.earlier
        metadata = {**(rows.metadata or {}), _header_key(header): json.dumps(header)}
        self._schema = pa.schema([*rows, *added], metadata=metadata)
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        try:
            # Most readers of parquet support zstd, which compresses thousands of rows well.
            self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")
        except OSError as error:
            self._journal.close()
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error

    def take_earlier(self, num_rows: int) -> pa.Table:
        """Return the journal's figures of the next `num_rows` rows, or of fewer if it has no more."""
        figures, self._earlier = self._earlier.slice(0, num_rows), self._earlier.slice(num_rows)
        return figures

    def add(self, rows: pa.RecordBatch, figures: pa.RecordBatch | pa.Table, *, is_new: bool) -> None:
        """Add the next rows. New figures are written to the journal first."""
        if is_new:
            self._journal.add(figures)
        table = pa.Table.from_arrays([*rows.columns, *figures.columns], schema=self._schema)
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        # Read `nbytes` once per table, because pyarrow goes through all of the table's chunks.
        self._waiting_bytes += table.nbytes
        if self._waiting_rows >= _ROW_GROUP_ROWS or self._waiting_bytes >= _ROW_GROUP_BYTES:
            self._write_waiting()

    def finish(self) -> None:
        """Put the file in its place, and delete the journal."""
        self._write_waiting()
        with file_errors(OutputError, f"write {self.path}"):
            self._writer.close()
            with self._temporary.open("rb") as file:
                os.fsync(file.fileno())
            self._temporary.replace(self.path)
            sync_folder(self.path.parent)
        self._journal.remove()

    def abort(self) -> None:
        """Close what is open. The journal stays, for a run that resumes."""
        with suppress(OSError):
            self._writer.close()
        self._temporary.unlink(missing_ok=True)
        self._journal.close()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        table, self._waiting = pa.concat_tables(self._waiting), []
        self._waiting_rows = self._waiting_bytes = 0
        with file_errors(OutputError, f"write {self.path}"):
            self._writer.write_table(table)


def check_finished(path: Path, header: Mapping[str, object]) -> None:
    """Raise OutputError unless a finished file belongs to this run. Delete its journal if that still exists."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        own_header = json.loads(metadata[_header_key(header)])
    except (OSError, pa.ArrowException, KeyError, ValueError, RecursionError) as error:
        raise OutputError(f"{path} is there, and is not of ppl-client corpus: choose another folder") from error
    # For a finished file, only the name and size of its input are compared, and not the checksum.
    wanted = {"input_sha256": own_header.get("input_sha256"), **header}
    check_same_run(path, own_header, wanted, "choose another folder")
    journal_of(path).unlink(missing_ok=True)


def _header_key(header: Mapping[str, object]) -> bytes:
    """The metadata key of a header. It includes the prefix of the added columns, so figures of another model
    in the same file keep their header."""
    prefix = header["column_prefix"]
    return HEADER_KEY + f".{prefix}".encode() if prefix else HEADER_KEY
