"""The file of a model card, in which only the text between marks is replaced, and a part of its front matter."""

import re
from pathlib import Path
from tempfile import TemporaryFile

from scoremode.errors import RunError, file_errors

START, END = "<!-- scoremode -->", "<!-- /scoremode -->"
"""Marks on lines of their own."""
_FRONT_MATTER = re.compile(r"\ufeff?\s*---[ \t]*\r?\n((?:.*\n)*?)---[ \t]*\r?(?:\n|\Z)")
"""As the hub reads it, also after a byte order mark and with blanks after the line."""
_MARK = re.compile(r"^\ufeff?<!-- (/?)scoremode -->[ \t]*(?=\r?$)", re.MULTILINE)


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
    _between(path, text)
    return text


def newline_of(text: str) -> str:
    """The line end that most of a text's lines have."""
    return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


def front_matter(text: str) -> slice | None:
    """The place of the YAML at the head of a card, between its lines of dashes; None if it has none."""
    match = _FRONT_MATTER.match(text)
    return None if match is None else slice(*match.span(1))


def with_block(path: Path, text: str, markdown: str) -> str:
    """The text of a card's file with new Markdown between its marks, or at its end with marks if it has none."""
    newline = newline_of(text)
    if (place := _between(path, text)) is None:
        gap = next(gap for gap in ("", newline, 2 * newline) if (text + gap).endswith(2 * newline))
        text = f"{text}{gap}{START}{newline}{END}{newline}"
        place = _between(path, text)
    assert place is not None
    return text[: place.start] + newline.join(["", *markdown.split("\n"), ""]) + text[place.stop :]


def _between(path: Path, text: str) -> slice | None:
    """The place between the marks below the front matter; None without marks. RunError if they are not one pair."""
    head = front_matter(text)
    marks = [*_MARK.finditer(text, 0 if head is None else head.stop)]
    match [mark[1] for mark in marks]:
        case []:
            return None
        case ["", "/"]:
            return slice(marks[0].end(), marks[1].start())
        case ["", *ends] if "/" not in ends:
            raise RunError(f"{path}: {START} has no {END} after it")
    raise RunError(f"{path}: keep one {START} and one {END} after it: no block says which comparison it is from")
