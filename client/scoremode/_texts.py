"""Handles foreign texts: encodings of files, validity, and safe display on a terminal."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from scoremode.errors import CorpusError

# Matches control characters (line ends too), invisible ones, direction marks, surrogates, and U+FFFE and U+FFFF.
_HIDDEN = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufffe\uffff]"
)

# UTF-32 comes first, because its little-endian mark begins with UTF-16's.
_MARKS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}


def encoding_of(path: Path) -> str:
    """The encoding of a text file: UTF-16, as PowerShell's `>` writes it, or UTF-32 according to its byte order mark,
    else UTF-8. Decoding removes the mark."""
    with path.open("rb") as file:
        beginning = file.read(4)
    return next((encoding for mark, encoding in _MARKS.items() if beginning.startswith(mark)), "utf-8-sig")


def valid_text(value: Any, name: str) -> str:
    """Return `value` if it is a text that UTF-8 can encode, else raise CorpusError; `name` is its name in the error."""
    if not isinstance(value, str):
        raise CorpusError(f"{name} is not text but {'null' if value is None else type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{name} is not valid Unicode at character {error.start}") from None
    return value


def printable(text: str) -> str:
    """Replace control characters and invisible ones with escapes such as `\\x1b`."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


MAX_SHOWN = 1000
"""Limit on the characters of a server's message that an error shows."""


def excerpt(message: object) -> str:
    """Convert a server's message to text, cut after `MAX_SHOWN` characters."""
    text = str(message)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not JSON, or not an object."""
    try:
        content = from_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def model_name(model: str) -> str:
    """The model's name in published files: its served or hub name, or the last part of a path."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return Path(model).name if is_path else model


def faults(error: ValidationError) -> Iterator[str]:
    """Yield pydantic's errors with their places, such as `settings.stride: Input should be greater than 0`."""
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        place, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
        yield ": ".join(filter(None, (place, message)))


def first_fault(error: ValidationError) -> str:
    """Return only the first of `faults`, because foreign input may have millions."""
    return next(faults(error))


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values in two columns, one line per pair."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {printable(value)}" for name, value in rows)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, in text, in Markdown or in the report."""

    header: str
    cells: Sequence[str]
    right: bool = True
    """Whether cells are aligned to the right."""


def aligned(columns: Iterable[Column]) -> list[str]:
    """Format a table for a terminal, one line per row."""
    padded = []
    for column in columns:
        cells = [column.header, *map(one_line, column.cells)]
        width = max(map(len, cells))
        padded.append([cell.rjust(width) if column.right else cell.ljust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def one_line(text: str) -> str:
    return " ".join(text.split())
