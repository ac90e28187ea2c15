"""The rows of an input file, batch by batch: parquet, and JSON lines of which pyarrow infers the columns."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scoremode.corpus.json_lines import JsonLines
from scoremode.errors import CorpusError

_BATCH_ROWS = 256
"""Few, because each may be a long document."""


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"cannot read {path}: {error}") from error
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in order. Raises CorpusError where the file is damaged."""
        with self._file:
            try:
                yield from self._file.iter_batches(_BATCH_ROWS)
            except (OSError, pa.ArrowException) as error:
                raise CorpusError(f"cannot read {self._path}: {error}") from error


Rows = ParquetRows | JsonLines


def open_rows(path: Path) -> Rows:
    """Open a file by its suffix. JSON lines are all read once, for the types of their columns; raises as they do."""
    return ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path)
