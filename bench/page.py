"""How long the page takes from the server's answer to the first colours, and how smoothly many tokens scroll.

    python bench/page.py URL
    python bench/page.py MODEL [any vllm serve flag]

In a headless Chromium, with texts of 2,000 and 10,000 tokens as far as the model's context allows, five alternatives
for each token. The time begins when the answer's last byte is there, so it has the parsing of the answer in it, and
ends when the first colours are painted.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "scripts")]

from playwright.sync_api import Page  # noqa: E402

from local_server import running_server  # noqa: E402
from tests import models  # noqa: E402
from tests.browser import installed_chromium, running_browser, visit  # noqa: E402

LENGTHS = (2_000, 10_000)
REPEATS = 7
ANSWER_MS = 600_000
CHARACTERS_A_TOKEN = 3

PAINTED = """() => {
  const answer = performance.getEntriesByType("resource").filter((entry) => entry.name.endsWith("/v1/score")).at(-1);
  const colours = performance.getEntriesByName("scoremode-colours").at(-1);
  return colours.startTime + colours.duration - answer.responseEnd;
}"""
NUM_MEASURES = '() => performance.getEntriesByName("scoremode-colours").length'
NUM_DRAWN = '() => document.querySelectorAll("#tokens [data-index]").length'
SCROLL = """async () => {
  const tokens = document.getElementById("tokens");
  const frame = () => new Promise(requestAnimationFrame);
  const times = [];
  let before = await frame();
  const isAtEnd = () => tokens.scrollTop + tokens.clientHeight >= tokens.scrollHeight - 1;
  for (tokens.scrollTop = 0; !isAtEnd(); tokens.scrollTop += 120) {
    const now = await frame();
    times.push(now - before);
    before = now;
  }
  return times;
}"""


def main(target: str, *flags: str) -> None:
    """Measure on a server that runs, or on one that is started."""
    if target.startswith(("http://", "https://")):
        measure(target.rstrip("/"))
        return
    with tempfile.TemporaryDirectory() as folder, running_server(target, *flags, log=Path(folder) / "log") as url:
        measure(url)


def measure(url: str) -> None:
    """Print the times for each length that the model's context allows."""
    executable = installed_chromium()
    if executable is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    context = httpx.get(f"{url}/v1/score").raise_for_status().json()["max_model_len"]
    with running_browser(executable) as browser:
        for length in LENGTHS:
            if length > context:
                print(f"{length:6,} tokens: left out, the model takes {context:,}")
                continue
            with visit(browser, viewport={"width": 1280, "height": 900}) as seen:
                seen.page.goto(f"{url}/scoremode")
                text = text_of(url, length)
                times = [first_colours(seen.page, text) for _ in range(REPEATS)][1:]
                print(f"{length:6,} tokens: {summary(times)} from the answer to the first colours")
                wait_until(seen.page, NUM_DRAWN, length)
                print(f"{length:6,} tokens: {summary(seen.page.evaluate(SCROLL))} a frame while scrolling")


def text_of(url: str, length: int) -> str:
    """A text with `length` tokens, or a few more or fewer where cutting changes what is a token."""
    text = models.pydoc_text()[: CHARACTERS_A_TOKEN * 2 * length]
    token_ids = httpx.post(f"{url}/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"][:length]
    decoded = httpx.post(f"{url}/detokenize", json={"tokens": token_ids}).raise_for_status()
    return str(decoded.json()["prompt"])


def first_colours(page: Page, text: str) -> float:
    """Milliseconds from the answer until the first colours are painted."""
    page.locator("#text").fill(text)
    before = page.evaluate(NUM_MEASURES)
    page.locator("#score").click()
    wait_until(page, NUM_MEASURES, before + 1)
    milliseconds: float = page.evaluate(PAINTED)
    return milliseconds


def wait_until(page: Page, count: str, wanted: int) -> None:
    """Wait until a function of the page's returns about `wanted`, asking seldom, so that the page has its time."""
    for _ in range(ANSWER_MS // 100):
        if page.evaluate(count) >= wanted:
            return
        page.wait_for_timeout(100)
    raise SystemExit(f"not there in time: {page.locator('#score-error').inner_text()}")


def summary(milliseconds: list[Any]) -> str:
    """Median and maximum."""
    return f"{statistics.median(milliseconds):.0f} ms (at most {max(milliseconds):.0f})"


if __name__ == "__main__":
    main(*sys.argv[1:])
