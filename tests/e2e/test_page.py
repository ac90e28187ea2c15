"""The page at `/scoremode` in a real browser: what it shows is what `/v1/score` says, and text stays text.

The second server answers as the first one does, with its logprobs changed on the way.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from scoremode.metrics import bits_per_byte, perplexity
from scoremode.windows import cut_windows
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
"""Nats from which on a token has the full color, as the legend says."""
ALPHA_TOLERANCE = 0.005
"""The page writes three digits, and the browser keeps eight bits."""
SURPRISE = (255, 138, 61)
"""The color of a surprise, among the light colors."""
SECOND = "http://second.test"
DOWN = "http://down.test"
LOWEST_LOGPROB = -9999.0
"""A server's JSON has this instead of minus infinity."""
CONTEXT, STRIDE = 128, 32
"""On `plugin_server`."""


@contextmanager
def opened(browser: Browser, *servers: str, failure: str | None = None) -> Iterator[Page]:
    """The page of the first of `servers`. It may ask these alone, and complain about nothing but `failure`."""
    with visit(browser, viewport={"width": 400, "height": 800}) as seen:
        seen.page.goto(f"{servers[0]}/scoremode")
        expect(seen.page.locator("#served")).not_to_have_text(re.compile("Asking"))
        seen.page.locator("#servers").evaluate("details => { details.open = true; }")
        yield seen.page
        assert not [url for url in seen.requests if not url.startswith((*servers, "data:"))]
        assert not [error for error in seen.errors if failure is None or failure not in error]


@pytest.fixture
def page(browser: Browser, server: str) -> Iterator[Page]:
    """The page of `server`."""
    with opened(browser, server, SECOND) as page:
        yield page


Change = Callable[[dict[str, Any]], None]


def change_answers(page: Page, url: str, server: str, change: Change) -> None:
    """Let a URL answer as a server does, but for a change of each result and the model's name."""

    def answer(route: Route) -> None:
        content = route.fetch(url=f"{server}/v1/score").json()
        for result in content.get("data", ()):
            change(result)
        content["model"] = f"/models/of/{url.rpartition('/')[2]}"
        route.fulfill(json=content, headers={"Access-Control-Allow-Origin": "*"})

    page.context.route(f"{url}/v1/score", answer)


def shifted(shift: float) -> Change:
    """Add so many nats to each logprob."""

    def change(result: dict[str, Any]) -> None:
        result["logprobs"] = [logprob and logprob + shift for logprob in result["logprobs"]]

    return change


def score(page: Page, text: str, second: str | None = None, key: str = "") -> None:
    """Type a text in, and the URL of a second server, have it scored, and wait until it is."""
    if second is not None:
        page.locator("#second-url").fill(second)
        page.locator("#second-key").fill(key)
    page.locator("#text").fill(text)
    page.locator("#score").click()
    expect(page.locator("#score-status")).to_be_empty()


def tokens(page: Page) -> Locator:
    return page.locator("#tokens [data-index]")


def asked(server: str, text: str) -> dict[str, Any]:
    """Ask the server itself for a text's scores."""
    body = {"prompt": text, "return_tokens": True, "return_ranks": True, "top_logprobs": 5}
    return httpx.post(f"{server}/v1/score", json=body, timeout=120).raise_for_status().json()["data"][0]


def backgrounds(page: Page) -> list[tuple[float, ...]]:
    """Red, green, blue and alpha of each token, as the browser paints it."""
    colors = tokens(page).evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")
    return [rgba(color) for color in colors]


def rgba(color: str) -> tuple[float, ...]:
    numbers = [float(number) for number in re.findall(r"[\d.]+", color)]
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


def test_tokens_are_colored_by_surprise_or_rank_and_summed(page, server):
    score(page, PROSE)
    result = asked(server, PROSE)
    first, *others = backgrounds(page)
    assert first == (0, 0, 0, 0), "the first token has no logprob"
    assert len(others) == len(result["logprobs"]) - 1 > 20
    for color, logprob in zip(others, result["logprobs"][1:], strict=True):
        assert color[3] == pytest.approx(min(-logprob / FULL_SURPRISE, 1), abs=ALPHA_TOLERANCE)
        assert color[:3] == SURPRISE
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


def test_the_tokens_are_the_text(server, plugin_server, browser):
    # On the second server SentencePiece puts a space first, and BOS, and bytes are tokens.
    for url, length, num_special in ((server, None, 0), (plugin_server, 60, 1)):
        with opened(browser, url, failure="401") as page:
            page.locator("#key").fill(API_KEY)
            for text in TEXTS:
                score(page, text[:length])
                assert shown_text(page) == text[:length]
                assert page.locator("#tokens .special[data-index='0']").count() == num_special
                assert figures(page)["Tokens scored"] == [f"{tokens(page).count() - 1} of {tokens(page).count()}"]


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
        # Another tab does not have it.
        other = page.context.new_page()
        other.goto(f"{plugin_server}/scoremode")
        expect(other.locator("#key")).to_have_value("")


def test_a_key_is_for_the_url_that_it_was_typed_for(page):
    one, other = "http://127.0.0.1:9", "http://127.0.0.1:9/below"
    url, key = page.locator("#second-url"), page.locator("#second-key")
    for typed, kept in ((one, ""), (other, ""), (f"{one}/", f"the key of {one}")):
        url.fill(typed)
        page.locator("#text").focus()
        expect(key).to_have_value(kept)
        key.fill(f"the key of {typed}")


def test_servers_with_other_tokens_are_not_compared(server, plugin_server, browser):
    with opened(browser, server, plugin_server) as page:
        score(page, "The capital of France", plugin_server, API_KEY)
        expect(page.locator("#score-error")).to_contain_text("cuts the text into other tokens")
        # The first server's figures are shown.
        assert backgrounds(page)[1][:3] == SURPRISE
        assert len(figures(page)["Perplexity"]) == 1


def test_what_is_shown_is_what_is_chosen(browser, server):
    with opened(browser, server, SECOND, DOWN, failure="Failed to load resource") as page:
        page.context.route(f"{DOWN}/**", lambda route: route.abort())
        legend, difference = page.locator("#legend"), page.get_by_role("radio", name="difference")
        score(page, PROSE, DOWN)
        expect(page.locator("#score-error")).to_contain_text("The second server cannot be reached. If it runs")
        expect(page.get_by_role("radio", name="surprise")).to_be_checked()
        expect(difference).to_be_disabled()
        for shift, color in ((-0.25, "rgba(255, 138, 61, 0.25)"), (0.5, "rgba(92, 165, 255, 0.5)")):
            change_answers(page, SECOND, server, shifted(shift))
            score(page, PROSE, SECOND)
            expect(page.locator("#score-error")).to_be_empty()
            expect(difference).to_be_checked()
            expect(legend).to_contain_text("less likely on the second server")
            expect(tokens(page).nth(3)).to_have_css("background-color", color)
        score(page, PROSE, "")
        expect(page.get_by_role("radio", name="surprise")).to_be_checked()
        expect(legend).to_contain_text("surprising")
        page.get_by_role("radio", name="rank").check()
        score(page, PROSE, SECOND)
        expect(page.get_by_role("radio", name="rank")).to_be_checked()
        expect(difference).to_be_enabled()


def impossible(result: dict[str, Any]) -> None:
    """Give the fourth token of a text no probability, and each token of a continuation."""
    places = (3,) if result["logprobs"][0] is None else range(len(result["logprobs"]))
    for place in places:
        result["logprobs"][place] = LOWEST_LOGPROB


def test_figures_without_a_finite_value(page, server):
    change_answers(page, SECOND, server, impossible)
    score(page, PROSE, SECOND)
    assert figures(page)["Sum of logprobs (nats)"][1] == "\N{MINUS SIGN}∞"
    assert [figures(page)[row][1] for row in ("Perplexity", "Bits per byte")] == ["∞", "∞"]
    assert backgrounds(page)[3] == (*SURPRISE, 1), "the full color of what is less likely"
    tokens(page).nth(3).hover()
    expect(page.locator("#card tr", has_text="difference")).to_contain_text("\N{MINUS SIGN}∞")
    change_answers(page, server, server, impossible)
    score(page, PROSE)
    assert backgrounds(page)[3] == (*SURPRISE, 0), "it is impossible on both"
    page.locator("#continuations").fill("one\nanother")
    page.locator("#compare").click()
    expect(page.locator("#preferred")).to_contain_text("finds each of them impossible.")


@pytest.mark.parametrize("body", ["<p>a proxy</p>", '{"data": [{"logprobs": [null]}]}'])
def test_a_response_of_another_kind_of_server(page, body):
    page.route("**/v1/score", lambda route: route.fulfill(body=body))
    page.locator("#continuations").fill("and so on")
    score(page, "a text")
    page.locator("#compare").click()
    for error in ("#score-error", "#compare-error"):
        expect(page.locator(error)).to_have_text("This server did not answer like Scoremode.")
    expect(page.locator("#preferred")).to_be_empty()


def test_results_of_an_earlier_text_look_stale(page):
    page.locator("#continuations").fill("one\ntwo")
    score(page, "a text")
    page.locator("#compare").click()
    expect(page.locator("#answers")).to_be_visible()
    notes = page.locator(".note")
    expect(notes.locator("visible=true")).to_have_count(0)
    page.locator("#continuations").fill("one\nthree")
    assert [note.is_visible() for note in notes.all()] == [False, True]
    page.locator("#text").fill("another")
    assert [note.is_visible() for note in notes.all()] == [True, True]


def test_both_servers_say_which_continuation_they_prefer(page, server):
    for url, sums in ((server, (-9.0, -1.0)), (SECOND, (0.0, -1.0))):

        def change(result: dict[str, Any], sums: tuple[float, float] = sums) -> None:
            place = result["continuation_index"]
            result |= {"sum_logprob": sums[place], "num_scored": 4, "is_greedy": sums[place] == 0}

        change_answers(page, url, server, change)
    page.locator("#second-url").fill(SECOND)
    page.locator("#text").fill("it is")
    page.locator("#continuations").fill("bbbbb\naaü")
    page.locator("#compare").click()
    expect(page.locator("#answers table")).to_have_count(2)
    own, other = server.rpartition("/")[2], SECOND.rpartition("/")[2]
    expect(page.locator("#preferred")).to_have_text(f"{own} prefers “aaü”. {other} prefers “bbbbb”.")
    *_, first, second = [row.locator("td").all_inner_texts() for row in page.locator("#answers tbody tr").all()]
    assert first == [*["0.000"] * 3, "4", "yes"]
    # " aaü" is five bytes.
    assert second == ["\N{MINUS SIGN}1.000", "\N{MINUS SIGN}0.250", "\N{MINUS SIGN}0.200", "4", "no"]


def pasted(page: Page, button: str) -> str:
    """Press a button, and return the text that it copies."""
    page.get_by_role("button", name=button).click()
    expect(page.locator("#copied")).to_contain_text("Copied")
    page.locator("#continuations").fill("")
    page.locator("#continuations").press("Control+V")
    return page.locator("#continuations").input_value()


def test_a_long_text_is_scored_in_the_windows_of_ppl_client(plugin_server, bos_client, browser, wikitext):
    text = wikitext[:800]
    ids = bos_client.tokenize(text)
    windows = cut_windows(len(ids), "sliding", CONTEXT, STRIDE)
    scores = bos_client.score([window.token_ids(ids) for window in windows])
    with opened(browser, plugin_server, SECOND, failure="401") as page:
        change_answers(page, SECOND, plugin_server, shifted(-0.25))
        page.locator("#key").fill(API_KEY)
        score(page, text, SECOND, API_KEY)
        expect(page.locator("#progress")).to_have_js_property("value", 2 * len(windows))
        record = json.loads(pasted(page, "Copy as JSON"))
        shown = figures(page)
        page.context.route(f"{SECOND}/v1/score", lambda route: None)
        page.locator("#score").click()
        expect(page.locator("#progress")).to_have_js_property("value", len(windows))
        page.locator("#stop").click()
        expect(page.locator("#score-status")).to_be_empty()
    first, second = record["data"]
    expected = [
        logprob for window, one in zip(windows, scores, strict=True) for logprob in one.logprobs[window.first_scored :]
    ]
    assert (first["logprobs"][0], first["token_ids"]) == (None, ids)
    assert first["logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert second["logprobs"][1:] == pytest.approx([each - 0.25 for each in expected], abs=1e-4)
    assert record["windows"] == {"method": "sliding", "context_length": CONTEXT, "stride": STRIDE}
    assert number(shown["Perplexity"][0]) == pytest.approx(math.exp(-math.fsum(expected) / len(expected)), rel=1e-4)


def test_a_link_has_the_text_and_what_it_is_colored_by(page):
    text = "50 % & more #1\n+ “ü”"
    score(page, text)
    page.get_by_role("radio", name="rank").check()
    url = pasted(page, "Copy a link")
    assert page.url == url
    page.get_by_role("radio", name="surprise").check()
    assert page.url == url.replace("rank", "surprise"), "the address bar follows"
    other = page.context.new_page()
    other.goto(url)
    expect(tokens(other)).to_have_count(tokens(page).count())
    expect(other.locator("#text")).to_have_value(text)
    expect(other.get_by_role("radio", name="rank")).to_be_checked()


def test_the_figures_of_every_token_are_copied_as_csv(page, server):
    text = 'a "text", of 2\nlines'
    change_answers(page, SECOND, server, shifted(-0.25))
    score(page, text, SECOND)
    rows = list(csv.DictReader(io.StringIO(pasted(page, "Copy as CSV"))))
    assert "".join(row["text"] for row in rows) == text
    assert (rows[0]["logprob"], rows[0]["difference"]) == ("", "")
    for row, logprob in zip(rows[1:], asked(server, text)["logprobs"][1:], strict=True):
        found = [float(row[name]) for name in ("logprob", "second_logprob", "difference")]
        assert found == pytest.approx([logprob, logprob - 0.25, -0.25], abs=1e-4)
