"""Links between documents lead to files and headings that there are, and so do the names of files in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for folder in (".", "docs", "bench", "tests/data") for page in (ROOT / folder).glob("*.md")]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
# Not of a file as it was at another commit.
FILE = re.compile(r"`((?:bench|docker|docs|scripts|tests)/[\w./-]+\.\w+)`(?! at [0-9a-f]{7})")
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub names them."""
    headings = HEADING.findall(CODE_BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = LINK.findall(CODE_BLOCK.sub("", page.read_text()))
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    headings = [(path, anchor) for path, anchor in targets if anchor and path.suffix == ".md"]
    assert [(path.name, anchor) for path, anchor in headings if anchor not in anchors(path)] == []
    # The changelog also names files as they were called then.
    named = [] if page.name == "CHANGELOG.md" else FILE.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
