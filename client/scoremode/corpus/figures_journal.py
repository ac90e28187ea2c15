"""The figures of a file that is not finished yet, in a file of their own that outlives the run, should it be killed.

It is a stream of Arrow record batches, each the figures of the rows after those of the batch before. A batch is handed
to the operating system in one piece, so a process that is killed leaves at most one torn batch, the last.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from scoremode.errors import OutputError
from scoremode.runs.journal import AppendedFile, check_same_run, open_locked

HEADER_KEY = b"scoremode"


class FiguresJournal(AppendedFile):
    """The journal of one output file: the figures of earlier sessions, and a place for those of this one."""

    def __init__(self, path: Path, header: Mapping[str, object], schema: pa.Schema) -> None:
        super().__init__(path, open_locked(path))
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
        """Write down the figures of the next rows."""
        self._append(figures.serialize())
        self.num_done += figures.num_rows

    def _read(self, header: Mapping[str, object], schema: pa.Schema) -> tuple[int, list[pa.RecordBatch]]:
        """The size of the file without a torn end, and the batches that are there."""
        batches: list[pa.RecordBatch] = []
        with pa.memory_map(str(self.path)) as source:
            try:
                found = pa.ipc.read_schema(source)
            except (OSError, pa.ArrowException):
                # Torn within the header, or no journal; one that is killed there has no more than that.
                if source.size() <= len(schema.serialize()):
                    return 0, batches
                raise OutputError(f"{self.path} is not a journal of this version of ppl-client; move it away") from None
            of_file = json.loads((found.metadata or {}).get(HEADER_KEY, b"{}"))
            check_same_run(self.path, of_file, header, "delete it to start afresh")
            while True:
                end = int(source.tell())
                try:
                    batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(source), schema))
                except (EOFError, OSError, pa.ArrowException):
                    return end, batches
