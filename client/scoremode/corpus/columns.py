"""The columns that are added to a file's rows, and the text that is taken from them."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from scoremode.corpus.documents import AnyDocument, Document, DocumentResult, ScoredDocument, UnscoredDocument
from scoremode.errors import CorpusError

FIGURES = {
    "num_tokens": pa.int64(),
    "nll": pa.float64(),
    "perplexity": pa.float64(),
    "bits_per_byte": pa.float64(),
}
PER_TOKEN = {"token_ids": pa.list_(pa.int32()), "token_logprobs": pa.list_(pa.float32())}


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
    values: list[list[object]] = [
        [result and result.num_tokens for result in scored],
        [result and result.nll for result in scored],
        [result and result.perplexity for result in scored],
        [result and result.bits_per_byte for result in scored],
    ]
    if len(schema) > len(values):
        values.append([result and np.asarray(result.token_ids, np.int32) for result in scored])
        values.append([result and result.logprobs for result in scored])
    arrays = [pa.array(column, field.type) for column, field in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def errors_of(results: Sequence[DocumentResult]) -> list[str | None]:
    """Why each row has no figures; None where it has."""
    return [result.error if isinstance(result, UnscoredDocument) else None for result in results]


def _document(text: bytes | None) -> AnyDocument:
    if not text:
        return UnscoredDocument("the text is null" if text is None else "the text is empty")
    try:
        return Document(text.decode(), len(text))
    except UnicodeDecodeError as error:
        return UnscoredDocument(f"the text is not UTF-8 at byte {error.start}")
