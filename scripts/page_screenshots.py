"""Pictures of the page for the docs, light and dark, of a server that runs.

python scripts/page_screenshots.py URL      writes docs/images/page-light.png and page-dark.png
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Page, expect  # noqa: E402

from screenshots import take_screenshot  # noqa: E402
from tests.browser import installed_chromium, running_browser, visit  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SAMPLE = "A factual paragraph"
CONTINUATIONS = "The largest city of Australia is Sydney.\nThe largest city of Australia is Paris."
POINTED_AT = "Sydney"
WIDTH, HEIGHT = 1000, 1340
ANSWER_MS = 60_000


def main(url: str) -> None:
    """Take both pictures."""
    executable = installed_chromium()
    if executable is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with running_browser(executable) as browser:
        schemes: tuple[Any, ...] = ("light", "dark")
        for scheme in schemes:
            options = {"color_scheme": scheme, "viewport": {"width": WIDTH, "height": HEIGHT}, "device_scale_factor": 2}
            with visit(browser, **options) as seen:
                seen.page.goto(f"{url.rstrip('/')}/scoremode")
                fill(seen.page)
                path = IMAGES / f"page-{scheme}.png"
                take_screenshot(seen.page, path, full_page=True)
                print(path)


def fill(page: Page) -> None:
    """Have a sample scored and continuations compared, and point at a token."""
    page.locator("#sample").select_option(SAMPLE)
    page.locator("#continuations").fill(CONTINUATIONS)
    page.locator("#compare").click()
    expect(page.locator("#answers")).to_be_visible(timeout=ANSWER_MS)
    page.locator("#score").click()
    expect(page.locator("#score-status")).to_be_empty(timeout=ANSWER_MS)
    page.locator("#tokens [data-index]", has_text=POINTED_AT).first.hover()


if __name__ == "__main__":
    main(*sys.argv[1:])
