"""Reads the rows of parquet and JSON lines batch by batch, and makes the columns that are added to them.

pyarrow infers the types of JSON lines from some rows at a time. These types may not fit the next rows, where a
column may be missing, or have floats after integers. So the file is read twice: first to find types that fit all lines,
then to read the rows with these types. Reading twice costs little compared with scoring.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scoremode.corpus.documents import (
    FIGURE_COLUMNS,
    AnyDocument,
    Document,
    DocumentResult,
    Figure,
    ScoredDocument,
    UnscoredDocument,
)
from scoremode.errors import CorpusError, ScoremodeError
from scoremode.runs import json_lines

_BATCH_ROWS = 256
"""Rows per batch; few, because each row may be a long document."""

_Block = list[tuple[str, dict[str, Any]]]
"""Some rows of JSON lines: each one's place, as error messages name it, and its values."""

FIGURES = {"num_tokens": pa.int64(), "nll": pa.float64(), "perplexity": pa.float64(), "bits_per_byte": pa.float64()}
PER_TOKEN = {"token_ids": pa.list_(pa.int32()), "token_logprobs": pa.list_(pa.float32())}


def open_rows(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return a file's schema and its rows in order. JSON lines are read once for the schema."""
    if path.suffix != ".parquet":
        schema = _json_schema(path)
        return schema, _json_batches(path, schema)
    with _read_errors(path):
        file = pq.ParquetFile(path)
    return file.schema_arrow, _parquet_batches(file, path)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except ScoremodeError:
        raise
    # pyarrow and each decompressor have exceptions of their own.
    except Exception as error:
        raise CorpusError(f"cannot read {path}: {error}") from error


def _parquet_batches(file: pq.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    with file, _read_errors(path):
        yield from file.iter_batches(_BATCH_ROWS)


def _json_schema(path: Path) -> pa.Schema:
    schema = pa.schema([])
    for block in _json_blocks(path):
        for name in dict.fromkeys(name for _, row in block for name in row):
            schema = _converted(block, partial(_with_column, schema, name), name)
    return schema


def _json_batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for block in _json_blocks(path):
        yield _converted(block, partial(pa.RecordBatch.from_pylist, schema=schema))


def _with_column(schema: pa.Schema, name: str, rows: Sequence[dict[str, Any]]) -> pa.Schema:
    """Give column `name` of the schema a type that fits these rows too."""
    column = pa.schema([(name, pa.array([row.get(name) for row in rows]).type)])
    return pa.unify_schemas([schema, column], promote_options="permissive")


def _converted(block: _Block, convert: Callable[[list[dict[str, Any]]], Any], name: str = "") -> Any:
    """Convert some rows. If pyarrow fails, CorpusError names the first row at fault."""
    try:
        return convert([row for _, row in block])
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        if len(block) > 1:
            # This raises if a row before the last is at fault.
            _converted(block[:-1], convert, name)
        message = " ".join(str(error).split())
        raise CorpusError(f"{block[-1][0]}: column {name!r} cannot be read with one type: {message}") from error


def _json_blocks(path: Path) -> Iterator[_Block]:
    """Yield the rows in blocks of up to `_BATCH_ROWS`."""
    with _read_errors(path):
        rows = ((where, _storable(row) or {}) for where, row in json_lines(path))
        while block := list(islice(rows, _BATCH_ROWS)):
            yield block


def _storable(value: Any) -> Any:
    """Replace empty objects in a JSON value by null, because parquet has no type for them."""
    if isinstance(value, dict):
        return {name: _storable(part) for name, part in value.items()} or None
    return [_storable(part) for part in value] if isinstance(value, list) else value


def added_schema(prefix: str, *, per_token: bool, figures: Sequence[Figure] = ()) -> pa.Schema:
    """The added columns, null where a document has no figures."""
    more = {FIGURE_COLUMNS[figure]: pa.float64() for figure in figures}
    columns = {**FIGURES, **more, **(PER_TOKEN if per_token else {})}
    return pa.schema([pa.field(prefix + name, type_) for name, type_ in columns.items()])


def check_columns(schema: pa.Schema, text_column: str, added: Sequence[str], where: str) -> None:
    """Raise CorpusError if the text column is missing, or a column already has the name of an added one."""
    if not schema.names:  # This is an empty file of JSON lines.
        return
    if schema.names.count(text_column) != 1:
        raise CorpusError(f"no column {text_column!r} in {where}; there are: {', '.join(schema.names)}")
    type_ = schema.field(text_column).type
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_type(value_type) for is_type in is_text):
        raise CorpusError(f"column {text_column!r} of {where} is {type_}, not text")
    if duplicates := [name for name in added if name in schema.names]:
        raise CorpusError(
            f"{where} has a column {duplicates[0]!r} already: give the new ones another name by --column-prefix"
        )


def documents_of(column: pa.Array) -> list[AnyDocument]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # Texts are read as bytes: their number is needed, and a text that is not UTF-8 must not make the others fail.
    return [_document(text) for text in column.cast(pa.large_binary()).to_pylist()]


def added_columns(results: Sequence[DocumentResult], schema: pa.Schema) -> pa.RecordBatch:
    scored = [result if isinstance(result, ScoredDocument) else None for result in results]
    prefix = schema.names[0].removesuffix("num_tokens")
    arrays = [
        pa.array([result and getattr(result, field.name.removeprefix(prefix)) for result in scored], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _document(text: bytes | None) -> AnyDocument:
    if not text:
        return UnscoredDocument("the text is null" if text is None else "the text is empty")
    try:
        return Document(text.decode(), len(text))
    except UnicodeDecodeError as error:
        return UnscoredDocument(f"the text is not UTF-8 at byte {error.start}")
