"""The rows of an input file, batch by batch: parquet, and JSON lines of which pyarrow infers the columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from scoremode.corpus.json_lines import JsonLines
from scoremode.errors import CorpusError

_BATCH_ROWS = 256
"""Few, because each may be a long document."""


class Rows(Protocol):
    """A file's rows."""

    @property
    def schema(self) -> pa.Schema:
        """Of every batch, with the file's metadata."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in order.

        Raises:
            CorpusError: the file is damaged.
        """


class ParquetRows:
    """The rows of a parquet file.

    Raises:
        CorpusError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"cannot read {path}: {error}") from error
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in order.

        Raises:
            CorpusError: the file is damaged.
        """
        with self._file:
            try:
                yield from self._file.iter_batches(_BATCH_ROWS)
            except (OSError, pa.ArrowException) as error:
                raise CorpusError(f"cannot read {self._path}: {error}") from error


def open_rows(path: Path) -> Rows:
    """Open a file by its suffix. Of JSON lines all are read once, for the types of their columns.

    Raises:
        CorpusError: it cannot be read, or a column of JSON lines has no one type.
    """
    return ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path)
