"""The file of a model card, in which only the text between marks is replaced."""

import re
from pathlib import Path
from tempfile import TemporaryFile

from scoremode.errors import RunError, file_errors

START, END = "<!-- scoremode -->", "<!-- /scoremode -->"
"""Marks on lines of their own; in YAML they are comments, after a `#`."""
_YAML, _MARKDOWN = "# ", ""


def read_card(path: Path) -> str:
    """The text of a card with its line ends and byte order mark; empty if there is no file yet.

    Raises:
        RunError: the file cannot be read or written, is not UTF-8, or its marks are not one pair.
    """
    with file_errors(RunError, f"write {path}"):
        TemporaryFile(dir=path.resolve().parent).close()
        content = b""
        if path.exists():
            with path.open("r+b") as file:
                content = file.read()
    # UTF-16 without a byte order mark is valid UTF-8 as far as ASCII goes.
    try:
        text = content.replace(b"\0", b"\xff").decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not UTF-8 at byte {error.start}: convert it, or name another file") from None
    for prefix in (_YAML, _MARKDOWN):
        _between(path, text, prefix)
    return text


def with_card(path: Path, text: str, yaml: str, markdown: str) -> str:
    """The text of a card's file with new contents between its marks, or with the Markdown at its end if it has none.

    An empty file gets the YAML too: that of other people's files is left to them.
    """
    newline = "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"
    if not text.strip():
        text = f"---\n# {START}\n# {END}\n---\n\n{START}\n{END}\n"
    elif _between(path, text, _MARKDOWN) is None:
        gap = next(gap for gap in ("", newline, 2 * newline) if (text + gap).endswith(2 * newline))
        text = f"{text}{gap}{START}{newline}{END}{newline}"
    for prefix, content in ((_YAML, yaml), (_MARKDOWN, markdown)):
        if (place := _between(path, text, prefix)) is not None:
            lines = ["", *content.split("\n"), ""]
            text = text[: place.start] + newline.join(lines) + text[place.stop :]
    return text


def _between(path: Path, text: str, prefix: str) -> slice | None:
    """The place between the marks that have this prefix; None without marks. RunError if they are not one pair."""
    marks = [*re.finditer(rf"^\ufeff?{prefix}<!-- (/?)scoremode -->[ \t]*(?=\r?$)", text, re.MULTILINE)]
    match [mark[1] for mark in marks]:
        case []:
            return None
        case ["", "/"]:
            return slice(marks[0].end(), marks[1].start())
        case ["", *ends] if "/" not in ends:
            raise RunError(f"{path}: {START} has no {END} after it")
    raise RunError(f"{path}: keep one {START} and one {END} after it: no block says which comparison it is from")
