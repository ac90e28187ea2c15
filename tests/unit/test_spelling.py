"""Everything that a user may read is spelled in American English."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BRITISH = re.compile(r"colour|behaviour|favour|neighbour|\b(?:centre|metres?|grey|catalogue|licence)\b", re.IGNORECASE)
SUFFIXES = (".py", ".js", ".css", ".html", ".j2", ".md")


def test_texts_of_the_packages_and_the_docs_are_american():
    files = [path for folder in ("client", "server", "docs") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in SUFFIXES}
    assert len(texts) > 100
    assert {str(path): found for path, text in texts.items() if (found := BRITISH.findall(text))} == {}
