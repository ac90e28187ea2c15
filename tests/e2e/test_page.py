"""The page at `/scoremode` in a real browser: what it shows is what `/v1/score` says, and text stays text."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from scoremode.metrics import bits_per_byte, perplexity
from tests.browser import visit
from tests.shared_servers import API_KEY

PROSE = "The capital of France is Paris.\nIt lies on the Seine,\n\nand  two million people live in it.\n"
MARKUP = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">&lt;b&gt; </textarea>"
TEXTS = [
    *(PROSE, MARKUP, "שלום עולם"),
    "def f(x):\n\tif x:\n        return [x]\n\n\n",
    "a 😀😀 b 👩‍💻🤷🏽‍♀️",
    "القاهرة هي عاصمة مصر، وهي أكبر مدينة.",
    "東京は日本の首都です。",
    "e\u0301 नमस्ते ไทย",
    "\ufffd and \ufffd\ufffdé",
    "  two before, two after  ",
]
FULL_SURPRISE = 10
"""Nats from which on a token has the full colour, as the legend says."""
ALPHA_TOLERANCE = 0.005
"""The page writes three digits, and the browser keeps eight bits."""
SURPRISE = (255, 138, 61)
"""Of the light colours."""


@contextmanager
def opened(browser: Browser, *servers: str, failure: str | None = None, **options: Any) -> Iterator[Page]:
    """The page of the first of `servers`. It may ask these alone, and complain about nothing but `failure`."""
    with visit(browser, **options) as seen:
        seen.page.goto(f"{servers[0]}/scoremode")
        expect(seen.page.locator("#served")).not_to_have_text(re.compile("Asking"))
        yield seen.page
        assert not [url for url in seen.requests if not url.startswith((*servers, "data:"))]
        assert not [error for error in seen.errors if failure is None or failure not in error]


@pytest.fixture
def page(browser: Browser, server: str) -> Iterator[Page]:
    """The page of `server`."""
    with opened(browser, server) as page:
        yield page


def score(page: Page, text: str) -> None:
    """Type a text in, have it scored, and wait until it is."""
    page.locator("#text").fill(text)
    page.locator("#score").click()
    expect(page.locator("#score-status")).to_be_empty()


def tokens(page: Page) -> Locator:
    return page.locator("#tokens [data-index]")


def asked(server: str, text: str) -> dict[str, Any]:
    """What the server itself returns for a text."""
    body = {"prompt": text, "return_tokens": True, "return_ranks": True, "top_logprobs": 5}
    response = httpx.post(f"{server}/v1/score", json=body, timeout=120).raise_for_status()
    result: dict[str, Any] = response.json()["data"][0]
    return result


def backgrounds(page: Page) -> list[tuple[float, ...]]:
    """Red, green, blue and alpha of each token, as the browser paints it."""
    colours = tokens(page).evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")
    return [rgba(colour) for colour in colours]


def rgba(colour: str) -> tuple[float, ...]:
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
    return (*numbers, 1.0) if len(numbers) == 3 else tuple(numbers)


def figures(page: Page) -> dict[str, list[str]]:
    """The table below the text: the cells of each row by its heading."""
    rows = page.locator("#figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace(",", "").removesuffix(" %"))


def shown_text(page: Page) -> str:
    """The text that the tokens are, without special tokens, which are not part of it."""
    texts = tokens(page).evaluate_all(
        "spans => spans.filter(span => !span.classList.contains('special')).map(span => span.textContent)"
    )
    return "".join(texts)


def test_tokens_are_coloured_by_surprise_or_rank_and_summed(page, server):
    score(page, PROSE)
    result = asked(server, PROSE)
    first, *others = backgrounds(page)
    assert first == (0, 0, 0, 0), "the first token has no logprob"
    assert len(others) == len(result["logprobs"]) - 1 > 20
    for colour, logprob in zip(others, result["logprobs"][1:], strict=True):
        assert colour[3] == pytest.approx(min(-logprob / FULL_SURPRISE, 1), abs=ALPHA_TOLERANCE)
        assert colour[:3] == SURPRISE
    assert "first token has no context" in page.locator("#first-token").inner_text()
    shown = figures(page)
    page.get_by_role("radio", name="rank").check()
    classes = [sum(rank > last for last in (1, 10, 100, 1000)) for rank in result["ranks"][1:]]
    legend = page.locator("#legend .class").all()
    hues = [rgba(each.evaluate("each => getComputedStyle(each).backgroundColor")) for each in legend]
    assert len(set(hues)) == 5
    assert backgrounds(page)[1:] == [hues[each] for each in classes]
    nlls = [-logprob for logprob in result["logprobs"][1:]]
    # The page shows three digits, and four of bits per byte.
    assert number(shown["Sum of logprobs (nats)"][0]) == pytest.approx(result["sum_logprob"], abs=0.001)
    assert number(shown["Perplexity"][0]) == pytest.approx(perplexity(nlls).perplexity, abs=0.001)
    expected = bits_per_byte(math.fsum(nlls), len(PROSE.encode()))
    assert number(shown["Bits per byte"][0]) == pytest.approx(expected, abs=0.0001)
    assert shown["Tokens scored"] == [f"{len(nlls)} of {len(nlls) + 1}"]


def check_card(card: Locator, result: dict[str, Any], index: int) -> None:
    expect(card).to_contain_text(f"token {index + 1}, id {result['token_ids'][index]}")
    own = dict(row.inner_text().split("\t") for row in card.locator("table").first.locator("tr").all())
    logprob = result["logprobs"][index]
    assert number(own["logprob"]) == pytest.approx(logprob, abs=0.001)
    assert number(own["probability"]) == pytest.approx(100 * math.exp(logprob), abs=0.01)
    assert own["rank"] == str(result["ranks"][index])
    alternatives = [row.inner_text().split("\t") for row in card.locator(".alternatives tbody tr").all()]
    expected = result["top_logprobs"][index]
    texts = [each["token"].replace(" ", "␣").replace("\n", "↵") for each in expected]
    assert [token for token, _, _ in alternatives] == texts
    logprobs = [each["logprob"] for each in expected]
    assert [number(value) for _, _, value in alternatives] == pytest.approx(logprobs, abs=0.001)


def test_the_keyboard_reaches_everything(server, page):
    page.locator("#text").focus()
    page.keyboard.insert_text(PROSE)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#score-status")).to_be_empty()
    focused = page.locator(":focus")
    for _ in range(10):
        page.keyboard.press("Tab")
        if focused.get_attribute("data-index") is not None:
            break
    result = asked(server, PROSE)
    # One stop for all tokens; within them the arrow keys.
    for key, index in {"ArrowRight": 1, "End": len(result["tokens"]) - 1, "ArrowLeft": None, "Home": 0}.items():
        page.keyboard.press(key)
        expect(focused).to_have_attribute("data-index", str(len(result["tokens"]) - 2 if index is None else index))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    on_the_second_line = int(focused.get_attribute("data-index") or 0)
    assert result["tokens"][:on_the_second_line].count("\n") == 1
    check_card(page.locator("#card"), result, on_the_second_line)
    page.keyboard.press("Escape")
    expect(page.locator("#card")).to_be_hidden()


def test_the_tokens_are_the_text(page):
    for text in TEXTS:
        score(page, text)
        assert shown_text(page) == text


def test_the_tokens_of_another_tokenizer_are_the_text(plugin_server, browser):
    # SentencePiece puts a space first, this one BOS too, and bytes are tokens.
    with opened(browser, plugin_server, failure="401") as page:
        page.locator("#key").fill(API_KEY)
        for text in TEXTS:
            score(page, text[:60])
            assert shown_text(page) == text[:60]
            expect(tokens(page).first).to_have_class(re.compile("special"))
            assert figures(page)["Tokens scored"] == [f"{tokens(page).count() - 1} of {tokens(page).count()}"]


def test_text_never_becomes_html(page):
    page.locator("#continuations").fill(MARKUP)
    score(page, MARKUP)
    page.locator("#compare").click()
    expect(page.locator("#answers")).to_be_visible()
    for index in range(tokens(page).count()):
        tokens(page).nth(index).hover()
    assert page.title() == "Scoremode"
    assert page.locator("img, body script, #tokens b").count() == 0


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(plugin_server, browser):
    with opened(browser, plugin_server, failure="401") as page:
        expect(page.locator("#served")).to_contain_text("needs an API key")
        page.locator("#key").fill("wrong")
        score(page, "a text")
        expect(page.locator("#score-error")).to_contain_text("does not accept the API key")
        page.locator("#key").fill(API_KEY)
        score(page, "a text")
        expect(page.locator("#score-error")).to_be_empty()
        assert tokens(page).count() > 1
        page.reload()
        expect(page.locator("#key")).to_have_value(API_KEY)
        assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        # Another tab has it not.
        other = page.context.new_page()
        other.goto(f"{plugin_server}/scoremode")
        expect(other.locator("#key")).to_have_value("")


def compare_with(page: Page, second: str, key: str = "") -> None:
    page.locator("#servers").evaluate("details => { details.open = true; }")
    page.locator("#second-url").fill(second)
    page.locator("#second-key").fill(key)


def test_a_key_is_for_the_url_that_it_was_typed_for(page):
    one, other = "http://127.0.0.1:9", "http://127.0.0.1:9/below"
    key = page.locator("#second-key")
    compare_with(page, one, "the key of one")
    page.locator("#second-url").fill(other)
    page.locator("#text").focus()
    expect(key).to_have_value("")
    key.fill("the key of the other")
    page.locator("#second-url").fill(f"{one}/")
    page.locator("#text").focus()
    expect(key).to_have_value("the key of one")


def test_servers_with_other_tokens_are_not_compared(server, plugin_server, browser):
    with opened(browser, server, plugin_server) as page:
        compare_with(page, plugin_server, API_KEY)
        score(page, "The capital of France")
        expect(page.locator("#score-error")).to_contain_text("cuts the text into other tokens")
        # What the first server says is there.
        assert backgrounds(page)[1][:3] == SURPRISE
        assert len(figures(page)["Perplexity"]) == 1
