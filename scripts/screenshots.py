"""Pictures of pages for the docs, as small files."""

from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

COLOURS = 128
"""What text and flat colours need, in a third of the bytes."""


def take_screenshot(page: Page, path: Path, *, full_page: bool = False) -> None:
    """Write what a page shows, or with `full_page` all of it, as a PNG of few colours."""
    page.screenshot(path=path, full_page=full_page)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
