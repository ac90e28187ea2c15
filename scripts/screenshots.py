"""Pictures for the docs, light and dark, in the Chromium that is installed.

python scripts/screenshots.py URL            docs/images/page-light.png and page-dark.png, of a server that runs
python scripts/screenshots.py REPORT.html    docs/images/report-light.png and report-dark.png
python scripts/screenshots.py REPORT.html --runs    docs/images/release-light.png and release-dark.png
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from playwright.sync_api import Page, expect  # noqa: E402

from tests.browser import installed_chromium, running_browser, visit  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLORS = 128
"""Colors of a picture: enough for text and flat colors, in a third of the bytes."""
REPORT_VIEW: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}}
PAGE_VIEW: dict[str, Any] = {"viewport": {"width": 1000, "height": 1340}, "device_scale_factor": 2}
SAMPLE = "A factual paragraph"
CONTINUATIONS = "The largest city of Australia is Sydney.\nThe largest city of Australia is Paris."
POINTED_AT = "Sydney"
CHOOSE = """
document.getElementById("text").scrollIntoView();
const shown = [...document.querySelectorAll(".tokens span")].filter((token) => token.getBoundingClientRect().top < 700);
shown.sort((one, other) => other.className.localeCompare(one.className))[0].focus({ preventScroll: true });
"""
"""Choose a token in the picture that has the last color of the scale."""


def show_page(page: Page) -> None:
    """Have a sample scored and continuations compared, and point at a token."""
    page.locator("#sample").select_option(SAMPLE)
    page.locator("#continuations").fill(CONTINUATIONS)
    page.locator("#compare").click()
    expect(page.locator("#answers")).to_be_visible()
    page.locator("#score").click()
    expect(page.locator("#score-status")).to_be_empty()
    page.locator("#tokens [data-index]", has_text=POINTED_AT).first.hover()


def show_report(page: Page) -> None:
    """The text with a divergent token chosen: every part of a report that a table or a plot does not show."""
    page.wait_for_selector(".tokens span")
    page.evaluate(CHOOSE)


def show_runs(page: Page) -> None:
    """The table of runs and the best of them at each size."""
    page.evaluate("document.getElementById('runs').scrollIntoView()")


def take(url: str, name: str, folder: Path) -> None:
    """Both pictures of a server's page or of a report, as PNGs of few colors."""
    executable = installed_chromium()
    if executable is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    is_page = name == "page"
    folder.mkdir(parents=True, exist_ok=True)
    with running_browser(executable) as browser:
        for scheme in ("light", "dark"):
            with visit(browser, color_scheme=scheme, **(PAGE_VIEW if is_page else REPORT_VIEW)) as seen:
                seen.page.goto(url)
                {"page": show_page, "report": show_report, "release": show_runs}[name](seen.page)
                path = folder / f"{name}-{scheme}.png"
                seen.page.screenshot(path=path, full_page=is_page)
            Image.open(path).convert("RGB").quantize(COLORS).save(path, optimize=True)
            print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shown", help="a server's URL, or a report")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    parser.add_argument("--runs", action="store_true", help="the report's table of runs instead of its text")
    options = parser.parse_args()
    if options.shown.startswith(("http://", "https://")):
        take(f"{options.shown.rstrip('/')}/scoremode", "page", options.folder)
    else:
        take(Path(options.shown).resolve().as_uri(), "release" if options.runs else "report", options.folder)


if __name__ == "__main__":
    main()
