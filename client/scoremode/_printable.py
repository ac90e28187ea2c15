"""Names and messages of files and servers, as they are shown: on one line, without what a terminal would obey."""

import re
from collections.abc import Sequence

# Control characters, line ends and marks of direction among them; what is invisible; lone surrogates; what XML lacks.
_HIDDEN = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    """The text with escapes in place of all that is not to be seen, such as `\\x1b`."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, one line each."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {printable(value)}" for name, value in rows)
