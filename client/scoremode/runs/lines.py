"""Reads JSON lines: texts to measure, corpora, and lm-eval's files."""

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
"""Limit on the characters of a line, which is read whole: a compressed file may unpack to a line of any length. No
server accepts a text this long."""


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each line; error messages name the line by its place. CorpusError for a line that is not
    an object; errors of reading, decoding and unpacking are raised unchanged.

    Lines end only at line feeds, because a row may contain U+2028. Bytes that are not text become surrogates;
    `valid_text` refuses a column that has them.
    """
    content = _unpacked(path)
    # The first two characters of JSON show its encoding.
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
    """Open a file, decompressed if its suffix is .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix != ".zst":
        return path.open("rb")
    with extra("corpora"):
        zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    # Allow windows of 2 GiB, as `zstd --long=31` makes; by default zstd refuses more than 128 MiB.
    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: 31})


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where} is not a JSON object")
    return row
