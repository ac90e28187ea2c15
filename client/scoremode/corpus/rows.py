"""The rows of an input file, batch by batch: parquet, and JSON lines of which pyarrow infers the columns."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scoremode.corpus.json_lines import JsonLines
from scoremode.errors import CorpusError

_BATCH_ROWS = 256
"""Few, because each may be a long document."""


def open_rows(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema of a file, and its rows in order. JSON lines are all read once, for the types of their columns.

    Raises:
        CorpusError: the file is damaged, also later, or JSON lines have no one type for a column.
    """
    if path.suffix != ".parquet":
        lines = JsonLines(path)
        return lines.schema, lines.batches()
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"cannot read {path}: {error}") from error
    return file.schema_arrow, _batches(file, path)


def _batches(file: pq.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    with file:
        try:
            yield from file.iter_batches(_BATCH_ROWS)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"cannot read {path}: {error}") from error
