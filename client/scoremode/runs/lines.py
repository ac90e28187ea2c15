"""The one reader of JSON lines: of a text that is measured, of a corpus, and of what lm-eval wrote."""

import gzip
import importlib
import json
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any

from scoremode.errors import CorpusError, extra

LONGEST_LINE = 64 << 20
"""Characters. A line is held whole, and a compressed file may unpack to one of any length. No server takes a text as
long."""


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each after where it is, in words. CorpusError for a line that is not an object; the errors of
    reading, decoding and unpacking stay as they are.

    Lines end at line feeds alone: a row may hold U+2028 and its like. Bytes that are not text become surrogates, for
    which a row is refused if they are in a column that is read.
    """
    content = _unpacked(path)
    # JSON's first two characters tell its encoding.
    encoding = json.detect_encoding(content.peek(4)[:4])
    with TextIOWrapper(content, encoding, errors="surrogateescape", newline="\n") as lines:
        for number in count(1):
            line, where = lines.readline(LONGEST_LINE + 1), f"{path}: line {number}"
            if len(line) > LONGEST_LINE:
                raise CorpusError(f"{where} has more than {LONGEST_LINE >> 20} MiB")
            if not line:
                return
            if not line.isspace():
                yield where, _row(line, where)


def _unpacked(path: Path) -> Any:
    """The bytes of a file, decompressed if its name says so."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix != ".zst":
        return path.open("rb")
    with extra("corpora"):
        zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    # `zstd --long=31` makes windows of 2 GiB; by default more than 128 MiB are refused.
    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: 31})


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where} is not a JSON object")
    return row
