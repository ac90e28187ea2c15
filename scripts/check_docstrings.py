"""Check prose: docstrings, docs of attributes and comments begin with a subject or a verb, and files have none of the
phrases that are hard to understand.

    python scripts/check_docstrings.py client server README.md [...]

Prints each finding with its file and line; the exit status is then 1.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BEGINNING = re.compile(
    r"(Of|What|That|Which|With|In which|By|Those|These|None that|Not for|Nothing|The same of|As of)\b"
)

INSTEAD = {
    r"(?<!there) (is|are) no (?!better|faster|less|longer|more|worse)[a-z]+\b": "is not",
    r"\bwhat scores\b|\bwho asks\b|\bwhoever\b|\bwhatever waits\b": "the request, client or task itself",
    r"\bgo(es)? on\b|\bgo_on\b|\b_way_on\b": "resume or continue",
    r"\bgive_up\b|\bmakes_room\b": "abort; may_evict",
    r"\bbeside\b": "next to; compared with; in addition to",
    r"\blikeliest\b": "top or most likely",
    r"\bbehind\b": "after",
    r"\bin the place of\b": "instead of",
    r"\btakes? the way of\b|\bhas it by\b|\bhas it not\b": "uses; is computed by; does not have it",
    r"\blacking\b": "missing",
    r"\bone an? (file|request|row|step|token|window)\b": "one per",
    r"\b(is|are) (said|told (?!apart)|waited for)\b": "say who does it",
    r"\bso that nobody may\b": "so no client can",
    r"\bfor certain\b": "always",
    r"\bof (so|as) many\b": "the number itself",
    r"\bNot for several threads\b": "Not thread-safe",
    r"\bNo call finds\b|\bwhat it is of\b|\bwere computed where\b": "say what a reader sees",
}
"""Phrases, and what to write instead. A space in a phrase also stands for the end of a line."""

PHRASES = {re.compile(phrase.replace(" ", r"[\s#]+"), re.IGNORECASE): instead for phrase, instead in INSTEAD.items()}
SUFFIXES = (".html", ".j2", ".js", ".md", ".py")


def faults(path: Path) -> Iterator[str]:
    """The findings in a file, with their lines."""
    text = path.read_text(encoding="utf-8")
    for line, doc in documents(text) if path.suffix == ".py" else ():
        if beginning := BEGINNING.match(doc):
            yield f"{path}:{line}: a docstring or comment begins with {beginning[0]}: write a sentence with a verb"
    for phrase, instead in PHRASES.items():
        for match in phrase.finditer(text):
            line = text.count("\n", 0, match.end()) + 1
            yield f"{path}:{line}: {' '.join(match[0].split())}: {instead}"


def documents(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, doc of an attribute, and first line of a comment in Python source."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str(doc))):
                yield node.lineno, doc.strip()
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            is_alone = token.line.lstrip().startswith("#")
            if not is_alone or line != last + 1:
                yield line, token.string.lstrip("# ")
            last = line if is_alone else -1


def main() -> None:
    places = map(Path, sys.argv[1:])
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.*")))]
    lines = [line for path in files if path.suffix in SUFFIXES for line in faults(path)]
    if lines:
        sys.exit("\n".join([*lines, f"{len(lines)} findings"]))


if __name__ == "__main__":
    main()
