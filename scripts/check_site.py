"""Check that every link and picture in a built site leads to a file of it, and every anchor to an element.

    python scripts/check_site.py site

Prints each broken one; the exit status is then 1. Links to other hosts are not checked."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The attributes of a page's elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def values(self, *names: str) -> set[str]:
        """The values of these attributes."""
        return {value for name, value in self.attributes if name in names and value}


def broken_links(site: Path) -> list[str]:
    """Every link of a site that leads nowhere, with its page."""
    pages = {path: Page(path) for path in site.resolve().rglob("*.html") if path.name != "404.html"}
    anchors = {path: page.values("id") for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.values("href", "src")):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file() or url.fragment not in anchors.get(target, {url.fragment}) | {""}:
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken


if __name__ == "__main__":
    # A text as the status is printed, and the status is 1.
    sys.exit("\n".join(broken_links(Path(sys.argv[1]))) or 0)
