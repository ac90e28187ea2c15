"""Pictures of a report for the docs, light and dark, in the Chromium that is installed.

python scripts/report_screenshots.py REPORT.html          write docs/images/report-light.png and report-dark.png
python scripts/report_screenshots.py RUN.json RUN.json... make the report first
"""

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from scoremode.comparison import compare, load_runs
from scoremode.comparison.report import write_report
from screenshots import take_screenshot

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tests.browser import installed_chromium, running_browser, visit  # noqa: E402

WIDTH, HEIGHT = 1280, 860

CHOOSE = """
document.getElementById("text").scrollIntoView();
const shown = [...document.querySelectorAll(".tokens span")].filter((token) => token.getBoundingClientRect().top < 700);
shown.sort((one, other) => other.className.localeCompare(one.className))[0].focus({ preventScroll: true });
"""
"""Of the tokens in the picture take one with the last colour of the scale."""


def take(browser: Browser, report: Path, folder: Path) -> None:
    """The text view with a divergent token chosen: every part of a report that a table or a plot does not show."""
    for scheme in ("light", "dark"):
        with visit(browser, color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT}) as seen:
            seen.page.goto(report.resolve().as_uri())
            seen.page.wait_for_selector(".tokens span")
            seen.page.evaluate(CHOOSE)
            take_screenshot(seen.page, folder / f"report-{scheme}.png")


def main() -> None:
    """Make the report unless it is given, and both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="one report, or runs")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    executable = installed_chromium()
    if executable is None:
        sys.exit("no browser is installed: apt-get install chromium")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, running_browser(executable) as browser:
        report = options.files[0]
        if report.suffix == ".json":
            report = Path(temporary) / "report.html"
            write_report(compare(load_runs(options.files)), report)
        take(browser, report, options.folder)


if __name__ == "__main__":
    main()
