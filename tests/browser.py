"""An installed Chromium for tests, driven by playwright, and what its pages do that nobody sees."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 120_000
"""For a browser to start, and for what is expected of a page. Playwright's 5 s are few where engines are at work."""


def installed_chromium() -> str | None:
    """The path of the first of EXECUTABLES that is installed."""
    return next(filter(None, map(shutil.which, EXECUTABLES)), None)


@contextmanager
def running_browser(executable: str) -> Iterator[Browser]:
    """A headless Chromium. While it runs, no asyncio loop can be started in this thread: playwright's own is."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, timeout=WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield browser
        browser.close()


@dataclass(frozen=True, slots=True)
class Visit:
    """A page in a browser context of its own, and everything that it asked for and complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    """The URLs, in order, the page's own first."""
    errors: list[str] = field(default_factory=list)
    """Errors and warnings on its console, violations of its Content-Security-Policy among them, and exceptions."""


@contextmanager
def visit(browser: Browser, **context_options: Any) -> Iterator[Visit]:
    """An empty page to open a URL in; options are those of playwright's `new_context`, such as `color_scheme`."""
    context = browser.new_context(**context_options)
    seen = Visit(context.new_page())
    context.on("request", lambda request: seen.requests.append(request.url))
    context.on("console", lambda line: seen.errors.append(line.text) if line.type in ("error", "warning") else None)
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    yield seen
    context.close()
