"""The rows of an input file, batch by batch: parquet, and JSON lines; their texts, and the columns that are added.

pyarrow parses JSON lines and infers their types, a block of whole lines at a time. What it infers of one block may not
fit the next: a column may be missing there, or have other numbers. So the file is read twice, first for the types that
fit all of its lines, and then with these. That costs little compared with scoring.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from scoremode.corpus.documents import AnyDocument, Document, DocumentResult, ScoredDocument, UnscoredDocument
from scoremode.errors import CorpusError

_BATCH_ROWS = 256
"""Few, because each may be a long document."""
BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 64 << 20
"""A line is held whole, and a compressed file may unpack to one of any length. No server takes a text as long."""
_LARGEST_EXACT = 2**53
"""Whole numbers beyond are not all floats, which pyarrow takes for those beyond 64 bits."""
_ROW = re.compile(r" in row (\d+)$")

FIGURES = {"num_tokens": pa.int64(), "nll": pa.float64(), "perplexity": pa.float64(), "bits_per_byte": pa.float64()}
PER_TOKEN = {"token_ids": pa.list_(pa.int32()), "token_logprobs": pa.list_(pa.float32())}


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
    return file.schema_arrow, _parquet_batches(file, path)


def _parquet_batches(file: pq.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    with file:
        try:
            yield from file.iter_batches(_BATCH_ROWS)
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"cannot read {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Block:
    """Some whole lines."""

    content: bytes
    first_line: int
    """In the file, from 1."""

    @property
    def last_line(self) -> int:
        """In the file."""
        return self.first_line + len(self.content.removesuffix(b"\n").split(b"\n")) - 1

    def line_of(self, row: int) -> int:
        """In the file, of a row, from 0: lines without a row do not count."""
        lines = self.content.split(b"\n")
        with_row = [number for number, line in enumerate(lines, start=self.first_line) if line.strip()]
        return with_row[row]


class JsonLines:
    """The rows of a file of JSON lines, compressed if its name says so.

    Raises:
        CorpusError: a line is no JSON object or too long, or a column has no one type.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.schema = self._infer_schema()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in order."""
        for block in self._blocks():
            yield from self._parse(block, self.schema).to_batches()

    def _infer_schema(self) -> pa.Schema:
        schema = pa.schema([])
        for block in self._blocks():
            table = self._parse(block, None)
            self._check_whole_numbers(table, block)
            try:
                # pyarrow takes a text that looks like a time for one. It stays the text that it is.
                found = pa.schema([field.with_type(_without_times(field.type)) for field in table.schema])
                schema = pa.unify_schemas([schema, found], promote_options="permissive")
            except pa.ArrowException as error:
                message = " ".join(str(error).split())
                raise CorpusError(
                    f"{self._path} has no one type for a column: {message}, in lines {block.first_line} to "
                    f"{block.last_line}"
                ) from error
        return schema

    def _parse(self, block: _Block, schema: pa.Schema | None) -> pa.Table:
        parsing = pj.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
        )
        reading = pj.ReadOptions(use_threads=False, block_size=len(block.content) + 1)
        try:
            table = pj.read_json(pa.BufferReader(block.content), read_options=reading, parse_options=parsing)
        except pa.ArrowException as error:
            message = " ".join(str(error).split())
            if found := _ROW.search(message):
                message = f"{message[: found.start()]} in line {block.line_of(int(found[1]))}"
                if "changed from" in message:
                    message += f", after the lines from {block.first_line}"
            else:
                message = f"{message} in lines {block.first_line} to {block.last_line}"
            raise CorpusError(f"cannot read {self._path}: {message}") from error
        return table if schema is None else table.select(schema.names).cast(schema)

    def _check_whole_numbers(self, table: pa.Table, block: _Block) -> None:
        """Refuse a column of whole numbers that do not fit 64 bits: pyarrow would round them."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not pa.types.is_floating(column.type):
                continue
            largest = pc.max(pc.abs(column)).as_py()
            if largest is not None and largest >= _LARGEST_EXACT and pc.all(pc.equal(column, pc.trunc(column))).as_py():
                raise CorpusError(
                    f"{self._path} has whole numbers in column {name!r} that are too large to be kept, in lines "
                    f"{block.first_line} to {block.last_line}: write them as texts"
                )

    def _blocks(self) -> Iterator[_Block]:
        rest, line = b"", 1
        try:
            with pa.input_stream(str(self._path), compression="detect") as stream:
                while chunk := stream.read(BLOCK_BYTES):
                    whole, newline, rest_of_chunk = chunk.rpartition(b"\n")
                    if not newline:
                        rest += chunk
                        if len(rest) > LONGEST_LINE_BYTES:
                            raise CorpusError(
                                f"cannot read {self._path}: line {line} has more than {LONGEST_LINE_BYTES >> 20} MiB"
                            )
                        continue
                    block = _Block(rest + whole + newline, line)
                    rest = rest_of_chunk
                    line += block.content.count(b"\n")
                    if block.content.strip():
                        yield block
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"cannot read {self._path}: {error}") from error
        if rest.strip():
            yield _Block(rest, line)


def _without_times(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_without_times(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_without_times(field.type)) for field in type_.fields])
    return type_


def added_schema(prefix: str, *, per_token: bool) -> pa.Schema:
    """The added columns, null where a document has no figures."""
    columns = {**FIGURES, **(PER_TOKEN if per_token else {})}
    return pa.schema([pa.field(prefix + name, type_) for name, type_ in columns.items()])


def check_columns(schema: pa.Schema, text_column: str, added: Sequence[str], where: str) -> None:
    """Refuse rows without the text, or with a column of a name that is added."""
    if not schema.names:  # A file of JSON lines without a line.
        return
    if schema.names.count(text_column) != 1:
        raise CorpusError(f"no column {text_column!r} in {where}; there are: {', '.join(schema.names)}")
    type_ = schema.field(text_column).type
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_type(value_type) for is_type in is_text):
        raise CorpusError(f"column {text_column!r} of {where} is {type_}, not text")
    if taken := [name for name in added if name in schema.names]:
        raise CorpusError(
            f"{where} has a column {taken[0]!r} already: give the new ones another name by --column-prefix"
        )


def documents_of(column: pa.Array) -> list[AnyDocument]:
    """The texts of a column."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # As bytes: their number is wanted, and one text that is not UTF-8 should not cost the others.
    return [_document(text) for text in column.cast(pa.large_binary()).to_pylist()]


def added_columns(results: Sequence[DocumentResult], schema: pa.Schema) -> pa.RecordBatch:
    """The added columns of some rows."""
    scored = [result if isinstance(result, ScoredDocument) else None for result in results]
    values: list[list[object]] = [[result and getattr(result, name) for result in scored] for name in FIGURES]
    if len(schema) > len(values):
        values.append([result and np.asarray(result.token_ids, np.int32) for result in scored])
        values.append([result and result.logprobs for result in scored])
    arrays = [pa.array(column, field.type) for column, field in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _document(text: bytes | None) -> AnyDocument:
    if not text:
        return UnscoredDocument("the text is null" if text is None else "the text is empty")
    try:
        return Document(text.decode(), len(text))
    except UnicodeDecodeError as error:
        return UnscoredDocument(f"the text is not UTF-8 at byte {error.start}")
