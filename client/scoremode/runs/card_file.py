"""Reads the file of a model card, finds its front matter, and replaces the text between two marks."""

import re
from pathlib import Path
from tempfile import TemporaryFile

from scoremode.errors import RunError, file_errors

START, END = "<!-- scoremode -->", "<!-- /scoremode -->"
"""Marks around the replaced text, each on its own line."""
_FRONT_MATTER = re.compile(r"\ufeff?\s*---[ \t]*\r?\n((?:.*\n)*?)---[ \t]*\r?(?:\n|\Z)")
"""Matches front matter as the hub does: a byte order mark, and blanks after the dashes, are allowed."""
_MARK = re.compile(r"^\ufeff?<!-- (/?)scoremode -->[ \t]*(?=\r?$)", re.MULTILINE)


def read_card(path: Path) -> str:
    """Read a card's text, including its line ends and byte order mark; empty if there is no file yet.

    Raises:
        RunError: the file cannot be read or written, is not UTF-8, or its marks are not one pair.
    """
    with file_errors(RunError, f"write {path}"):
        TemporaryFile(dir=path.resolve().parent).close()
        content = b""
        if path.exists():
            with path.open("r+b") as file:
                content = file.read()
    # Make NUL invalid, because ASCII in UTF-16 without a byte order mark would be valid UTF-8.
    try:
        text = content.replace(b"\0", b"\xff").decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not UTF-8 at byte {error.start}: convert it, or name another file") from None
    _between(path, text)
    return text


def newline_of(text: str) -> str:
    """The line end of most lines in a text."""
    return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


def front_matter(text: str) -> slice | None:
    """The range of the YAML between the lines of dashes at the top of a card; None if it has none."""
    match = _FRONT_MATTER.match(text)
    return None if match is None else slice(*match.span(1))


def with_block(path: Path, text: str, markdown: str) -> str:
    """Put new Markdown between the marks in a card's text. A text without marks gets them at its end."""
    newline = newline_of(text)
    if (place := _between(path, text)) is None:
        gap = next(gap for gap in ("", newline, 2 * newline) if (text + gap).endswith(2 * newline))
        text = f"{text}{gap}{START}{newline}{END}{newline}"
        place = _between(path, text)
    assert place is not None
    return text[: place.start] + newline.join(["", *markdown.split("\n"), ""]) + text[place.stop :]


def _between(path: Path, text: str) -> slice | None:
    """The range between the marks after the front matter; None without marks. RunError if they are not one pair."""
    head = front_matter(text)
    marks = [*_MARK.finditer(text, 0 if head is None else head.stop)]
    match [mark[1] for mark in marks]:
        case []:
            return None
        case ["", "/"]:
            return slice(marks[0].end(), marks[1].start())
        case ["", *ends] if "/" not in ends:
            raise RunError(f"{path}: {START} has no {END} after it")
    raise RunError(f"{path}: keep one {START} and one {END} after it, because blocks cannot be told apart")
