"""The page at `/scoremode` in a real browser, with two made-up servers: a character is a token."""

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from scoremode.windows import cut_windows
from tests.browser import visit

FILES = Path(__file__).parents[2] / "server" / "scoremode_server" / "page"
FIRST, SECOND = "http://first.test", "http://second.test"
CONTEXT, STRIDE = 64, 16
LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity in a server's JSON."""
LONG = "".join(chr(97 + index * index % 23) for index in range(200))


@dataclass
class MadeUpServer:
    """Answers as a Scoremode server does; a token is less likely on one with a `shift`."""

    model: str
    shift: float = 0.0
    is_held: bool = False
    """Whether texts in windows get no answer."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of each window that was scored, and the first position that was asked for."""

    def logprob(self, tokens: list[int], position: int) -> float:
        return -(1 + (3 * tokens[position] + 5 * tokens[position - 1] + position) % 29) / 8 - self.shift

    def answer(self, route: Route) -> None:
        path, body = route.request.url.split("/", 3)[3], route.request.post_data_json
        headers = {"Access-Control-Allow-Origin": "*"}
        if path.startswith("scoremode"):
            route.fulfill(path=FILES / (path.partition("/")[2] or "index.html"))
        elif body is None:
            limits = {"max_model_len": CONTEXT, "max_top_logprobs": 20}
            route.fulfill(headers=headers, json={"model": self.model, "dtype": "float32", **limits})
        elif path == "tokenize":
            route.fulfill(headers=headers, json={"tokens": [*map(ord, body["prompt"])]})
        elif not (self.is_held and "logprobs_from" in body):
            route.fulfill(headers=headers, json={"model": self.model, "data": self.results(body)})

    def results(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, first = body["prompt"], body.get("logprobs_from", 0)
        if "continuations" in body:
            return [self.result(prompt + each, len(prompt)) for each in body["continuations"]]
        if isinstance(prompt, list):
            self.windows.append((len(prompt[0]), first))
            prompt = "".join(map(chr, prompt[0]))
        return [self.result(prompt, first)]

    def result(self, text: str, first: int) -> dict[str, Any]:
        tokens = [*map(ord, text)]
        logprobs = [None, *(self.logprob(tokens, position) for position in range(1, len(tokens)))][first:]
        scored = [each for each in logprobs if each is not None]
        ranks = [each and round(-8 * (each + self.shift)) for each in logprobs]
        sums = {"sum_logprob": math.fsum(scored), "num_scored": len(scored), "is_greedy": not any(scored)}
        return {"token_ids": tokens[first:], "tokens": [*text[first:]], "logprobs": logprobs, "ranks": ranks, **sums}


@pytest.fixture
def servers() -> tuple[MadeUpServer, MadeUpServer]:
    return MadeUpServer("/models/an-organization/base"), MadeUpServer("/a/long/path/to/models/quantized", 0.25)


@pytest.fixture
def page(browser: Browser, servers: tuple[MadeUpServer, MadeUpServer]) -> Iterator[Page]:
    with visit(browser, viewport={"width": 400, "height": 800}) as seen:
        for url, server in zip((FIRST, SECOND), servers, strict=True):
            seen.page.context.route(f"{url}/**", server.answer)
        seen.page.goto(f"{FIRST}/scoremode")
        expect(seen.page.locator("#served")).to_contain_text("base · context 64")
        seen.page.locator("#servers summary").click()
        yield seen.page
        failures = [error for error in seen.errors if "Failed to load resource" not in error]
        assert not failures


def score(page: Page, text: str, second: str | None = None) -> None:
    if second is not None:
        page.locator("#second-url").fill(second)
    page.locator("#text").fill(text)
    page.locator("#score").click()
    expect(page.locator("#score-status")).to_be_empty()


def pasted(page: Page, button: str) -> str:
    """What a button copies."""
    page.get_by_role("button", name=button).click()
    expect(page.locator("#copied")).to_contain_text("Copied")
    page.locator("#continuations").fill("")
    page.locator("#continuations").press("Control+V")
    return page.locator("#continuations").input_value()


def test_what_is_shown_is_what_is_chosen(page, servers):
    page.context.route("http://down.test/**", lambda route: route.abort())
    legend, difference = page.locator("#legend"), page.get_by_role("radio", name="difference")
    score(page, "a text", "http://down.test")
    expect(page.locator("#score-error")).to_contain_text("The second server cannot be reached. If it runs")
    expect(page.get_by_role("radio", name="surprise")).to_be_checked()
    expect(difference).to_be_disabled()
    score(page, "a text", SECOND)
    expect(page.locator("#score-error")).to_be_empty()
    expect(difference).to_be_checked()
    expect(legend).to_contain_text("less likely on the second server")
    token = page.locator("#tokens [data-index]").nth(3)
    expect(token).to_have_css("background-color", "rgba(255, 138, 61, 0.25)")
    servers[1].shift = -0.5
    score(page, "a text", SECOND)
    expect(token).to_have_css("background-color", "rgba(92, 165, 255, 0.5)")
    score(page, "a text", "")
    expect(page.get_by_role("radio", name="surprise")).to_be_checked()
    expect(legend).to_contain_text("surprising")


def figures(page: Page, row: str) -> list[str]:
    return page.locator("#figures tr", has_text=row).locator("td").all_inner_texts()


def test_figures_without_a_finite_value(page, servers):
    first, second = servers
    finite = first.logprob
    second.logprob = lambda tokens, at: LOWEST_LOGPROB if at == 3 else finite(tokens, at)
    score(page, "a text", SECOND)
    assert figures(page, "Sum of logprobs")[1] == "\N{MINUS SIGN}∞"
    assert [figures(page, row)[1] for row in ("Perplexity", "Bits per byte")] == ["∞", "∞"]
    token = page.locator("#tokens [data-index]").nth(3)
    background = "token => getComputedStyle(token).backgroundColor"
    assert token.evaluate(background) == "rgb(255, 138, 61)", "the full color of what is less likely"
    token.hover()
    expect(page.locator("#card tr", has_text="difference")).to_contain_text("\N{MINUS SIGN}∞")
    first.logprob = second.logprob
    score(page, "a text")
    assert token.evaluate(background) == "rgba(255, 138, 61, 0)", "it is impossible on both"
    first.logprob = lambda tokens, at: LOWEST_LOGPROB
    page.locator("#continuations").fill("one\nanother")
    page.locator("#compare").click()
    expect(page.locator("#preferred")).to_contain_text("base finds each of them impossible.")


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


def test_both_servers_say_which_continuation_they_prefer(page, servers):
    servers[1].logprob = lambda tokens, position: -0.5 * (tokens[position] == ord("a"))
    page.locator("#second-url").fill(SECOND)
    page.locator("#text").fill("it is")
    page.locator("#continuations").fill("bbbbb\naaü")
    page.locator("#compare").click()
    expect(page.locator("#answers table")).to_have_count(2)
    expect(page.locator("#preferred")).to_have_text("base prefers “aaü”. quantized prefers “bbbbb”.")
    *_, first, second = [row.locator("td").all_inner_texts() for row in page.locator("#answers tbody tr").all()]
    assert first == [*["0.000"] * 3, "6", "yes"]
    assert second == ["\N{MINUS SIGN}1.000", "\N{MINUS SIGN}0.250", "\N{MINUS SIGN}0.200", "4", "no"]


def test_a_long_text_is_scored_in_the_windows_of_ppl_client(page, servers):
    score(page, LONG, SECOND)
    windows = cut_windows(len(LONG), "sliding", CONTEXT, STRIDE)
    tokens, expected = [*map(ord, LONG)], []
    for window in windows:
        inner = tokens[window.start : window.end]
        expected += [servers[0].logprob(inner, at) for at in range(window.first_scored, len(inner))]
    record = json.loads(pasted(page, "Copy as JSON"))
    first, second = record["data"]
    assert (first["logprobs"], first["token_ids"]) == ([None, *expected], tokens)
    assert second["logprobs"][1:] == [each - 0.25 for each in expected]
    assert record["windows"] == {"method": "sliding", "context_length": CONTEXT, "stride": STRIDE}
    assert len(servers[0].windows) == len(servers[1].windows) == len(windows)
    mean = -math.fsum(expected) / len(expected)
    assert float(figures(page, "Perplexity")[0]) == pytest.approx(math.exp(mean), abs=0.001)
    servers[1].is_held = True
    page.locator("#text").fill(LONG * 2)
    page.locator("#score").click()
    count = len(cut_windows(2 * len(LONG), "sliding", CONTEXT, STRIDE))
    expect(page.locator("#progress")).to_have_js_property("value", count)
    page.locator("#stop").click()
    expect(page.locator("#score-status")).to_be_empty()


def test_a_link_has_the_text_and_what_it_is_coloured_by(page):
    text = "50 % & more #1\n+ “ü”"
    score(page, text)
    page.get_by_role("radio", name="rank").check()
    url = pasted(page, "Copy a link")
    assert page.url == url
    page.get_by_role("radio", name="surprise").check()
    assert page.url == url.replace("rank", "surprise"), "the address bar follows"
    opened = page.context.new_page()
    opened.goto(url)
    expect(opened.locator("#tokens [data-index]")).to_have_count(len(text))
    expect(opened.locator("#text")).to_have_value(text)
    expect(opened.get_by_role("radio", name="rank")).to_be_checked()


def test_the_figures_of_every_token_are_copied_as_csv(page, servers):
    text = 'a "text", of 2\nlines'
    score(page, text, SECOND)
    rows = list(csv.DictReader(io.StringIO(pasted(page, "Copy as CSV"))))
    assert "".join(row["text"] for row in rows) == text
    assert (rows[0]["logprob"], rows[0]["difference"]) == ("", "")
    tokens = [*map(ord, text)]
    assert float(rows[5]["logprob"]) == servers[0].logprob(tokens, 5)
    assert float(rows[5]["second_logprob"]) == servers[1].logprob(tokens, 5)
    assert {row["difference"] for row in rows[1:]} == {"-0.25"}
