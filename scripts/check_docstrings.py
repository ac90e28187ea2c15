"""Check how docstrings begin: each is a sentence with a verb, and does not begin with a word that leaves it out.

python scripts/check_docstrings.py client [server ...]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BEGINNING = re.compile(r"(Of|What|That|Which|With|In which)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Documented) and (found := BEGINNING.match(ast.get_docstring(node) or "")):
            line = 1 if isinstance(node, ast.Module) else node.lineno
            yield f"{path}:{line}: a docstring begins with {found[0]}: write a sentence with a verb"


def main() -> None:
    lines = [line for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")) for line in faults(path)]
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
