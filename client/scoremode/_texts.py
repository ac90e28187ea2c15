"""Texts from other people's files: their encoding, and whether they are valid."""

import codecs
from pathlib import Path
from typing import Any

from scoremode.errors import CorpusError


def encoding_of(path: Path) -> str:
    """The encoding of a text file: UTF-16 if its byte order mark says so, as PowerShell's `>` writes it, else UTF-8.
    Decoding removes the mark."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def valid_text(value: Any, name: str) -> str:
    """Return a value that is text which UTF-8 can hold; raise a CorpusError with its name if it is not."""
    if not isinstance(value, str):
        raise CorpusError(f"{name} is not text but {'null' if value is None else type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{name} is not valid Unicode at character {error.start}") from None
    return value
