"""Results as text."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, in which a row may have fewer cells than the header."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ("---",) * len(header), *rows))
