"""The report in a real browser, opened from disk."""

import math
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up_runs import MODELS, write_runs
from PIL import Image
from playwright.sync_api import expect

from scoremode.comparison import card, compare, load_runs
from scoremode.comparison.report import write_report
from tests.browser import visit

NUM_TOKENS, NUM_WINDOWS, WINDOW = 3000, 24, 125
HOSTILE = "<script>alert(1)</script>"
ARABIC = " السلام"
SIGNS = str.maketrans({" ": "␣", "\n": "↵"})
# The steps of the legend, in nats.
KLD_STEPS = [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
DIFFERENCE_STEPS = [-1, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reference's own model and two others."""
    models = (MODELS[0], MODELS[3], MODELS[5])
    folder = tmp_path_factory.mktemp("runs")
    return load_runs(write_runs(folder, NUM_TOKENS, models=models, vocab_size=300, context_length=500))


@pytest.fixture(scope="module")
def shown(browser, runs, tmp_path_factory):
    """A function that opens a report in a page, which asks for nothing else and complains about nothing."""
    folder = tmp_path_factory.mktemp("report")
    write_report(compare(runs, num_resamples=10), folder / "unchanged.html")

    @contextmanager
    def show(chosen, color_scheme="light"):
        path = folder / ("unchanged.html" if chosen is runs else "changed.html")
        if chosen is not runs:
            write_report(compare(chosen, num_resamples=10), path)
        with visit(browser, viewport={"width": 1280, "height": 900}, color_scheme=color_scheme) as seen:
            seen.page.goto(path.as_uri())
            seen.page.wait_for_selector(".tokens span")
            yield seen.page
            assert seen.requests == [path.as_uri()]
            assert seen.errors == []

    return show


@pytest.fixture
def page(shown, runs):
    with shown(runs) as page:
        yield page


def token_at(page, position):
    return page.locator(f'[data-position="{position}"]')


def choose(page, measure, *labels):
    """Color the tokens by a measure of one run or two."""
    page.select_option("#measure", measure)
    for name, label in zip(("first", "second"), labels, strict=False):
        page.select_option(f"#{name}", label=label)


def style(page, selector, name):
    """A property of each element that matches, as it is on the screen."""
    return page.locator(selector).evaluate_all(f"all => all.map(each => getComputedStyle(each).{name})")


def assert_colors(page, values, steps):
    """Check that the text has the legend's colors for its values, except for values as near to a step as rounding."""
    found, colors = (style(page, elements, "backgroundColor") for elements in (".tokens span", "#legend li"))
    found, values = found[:WINDOW], values[:WINDOW]
    clear = np.abs(values[:, None] - np.array(steps)).min(axis=1) > 1e-3 * np.minimum(np.abs(values), 1)
    expected = [colors[sum(value >= step for step in steps)] for value in values]
    assert clear.mean() > 0.9
    assert (len(colors), len(set(colors))) == (9, 9)
    assert len(set(expected)) > 2
    assert [each for each in zip(found, expected, clear, strict=True) if each[2] and each[0] != each[1]] == []


@pytest.mark.parametrize(
    ("scheme", "paper", "ink"),
    [("light", "rgb(255, 255, 255)", "rgb(27, 31, 36)"), ("dark", "rgb(20, 23, 28)", "rgb(232, 235, 239)")],
)
def test_tokens_and_plots_have_the_colors_of_the_scheme(shown, runs, scheme, paper, ink):
    base, _, worst = runs
    with shown(runs, scheme) as page:
        plots = [style(page, f"figure svg {element}", "fill")[0] for element in ("path", "text")]
        assert [*plots, *style(page, "body", "backgroundColor")] == [paper, ink, paper]
        page.select_option("#scale", "fixed")
        # First shown is the KL divergence of the run that has most.
        assert page.locator("#measure").input_value() == "kld"
        assert_colors(page, worst.kld, KLD_STEPS)
        choose(page, "nll_difference", worst.label, base.label)
        assert_colors(page, worst.nlls - base.nlls, DIFFERENCE_STEPS)


def test_the_table_sorts_by_a_column(shown, runs):
    """Infinite values are the largest, and unknown ones are last in both orders."""
    infinite = replace(runs[1], nlls=np.where(np.arange(NUM_TOKENS) == 10, np.inf, runs[1].nlls))
    with shown([runs[0], infinite, runs[2]]) as page:
        rows, headers = page.locator(".sortable tbody th"), page.locator(".sortable thead th")
        perplexity, labels = headers.filter(has_text="perplexity"), [run.label for run in runs]
        by_nll = [labels[place] for place in (0, 2, 1)]
        for order, expected in (("ascending", by_nll), ("descending", by_nll[::-1])):
            perplexity.locator("button").click()
            assert (rows.all_inner_texts(), perplexity.get_attribute("aria-sort")) == (expected, order)
        for _ in range(2):
            headers.filter(has_text="PPL ratio").locator("button").click()
            assert rows.last.inner_text() == labels[0], "the base has no ratio to itself"


def figures(page):
    """The table of the chosen token, by the run's name."""
    rows = page.locator("#token .figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def assert_figures(page, runs, position):
    """Check that the panel shows each run's figures at a position."""
    found, text = figures(page), runs[0].token_texts
    assert list(found) == [run.label for run in runs], "the reference is the run of its model"
    for run in runs:
        logprob, probability, rank, kld, prefers = found[run.label]
        # Shown to three digits after the point, from NLLs rounded to a 65,534th of the largest.
        assert float(logprob) == pytest.approx(-run.nlls[position], abs=1e-3)
        assert float(probability.split()[0]) == pytest.approx(100 * math.exp(-run.nlls[position]), rel=0.6, abs=0.06)
        assert int(rank.replace(",", "")) == run.ranks[position]
        assert float(kld) == pytest.approx(run.kld[position], abs=6e-4, rel=2e-3)
        tops = run.reference_top_token_ids if run is runs[0] else run.top_token_ids
        assert prefers.split("\n")[0] == text[int(tops[position])].translate(SIGNS)
    prefers = found[runs[0].label][-1]
    assert f"{100 * runs[0].reference_confidence[position]:.1f} %" in prefers
    assert page.locator("#token .shown").inner_text() == text[int(runs[0].token_ids[position])].translate(SIGNS)


def assert_focus(page, position):
    expect(page.locator(":focus")).to_have_attribute("data-position", str(position))


def test_pointer_and_keyboard_show_the_figures_of_every_token(page, runs):
    token_at(page, 30).hover()
    expect(page.locator("#token")).not_to_have_text("No token chosen.")
    assert_figures(page, runs, 30)
    token_at(page, 0).focus()
    for _ in range(31):
        page.keyboard.press("ArrowRight")
    assert_figures(page, runs, 31)
    last = int(runs[0].window_sizes[0]) - 1
    # Tab leaves the passage, and comes back to the same token.
    for key, position in (("ArrowLeft", 30), ("Home", 0), ("End", last), ("Tab", None), ("Shift+Tab", last)):
        page.keyboard.press(key)
        if position is not None:
            assert_focus(page, position)


def test_any_text_is_shown_in_its_own_way(shown, runs):
    """Arabic from the right, what has no text as its id, and markup as text."""
    ids = np.full(NUM_TOKENS, 3, np.int32)
    ids[3:7] = 400, 5, 2, 6
    texts = {**runs[0].token_texts, 3: ARABIC, 5: "one \n\ntwo", 2: HOSTILE, 6: "a" + 7 * "\n"}
    with shown([replace(run, token_ids=ids, token_texts=texts) for run in runs]) as page:
        first, second, third = (token_at(page, position).bounding_box()["x"] for position in range(3))
        assert first > second > third
        assert token_at(page, 0).inner_text().strip() == ARABIC.strip(), "each word stays whole"
        assert token_at(page, 3).inner_text() == "⟨400⟩"
        assert token_at(page, 4).text_content() == "one \u00d72\ntwo"
        assert token_at(page, 6).text_content() == "a\u00d77\n"
        token_at(page, 5).hover()
        assert [token_at(page, 5).inner_text(), page.locator("#token .shown").inner_text()] == [HOSTILE] * 2
        assert page.locator("script").count() == 2


def legend(page):
    """Lower ends of the classes, and how many tokens each has."""
    rows = [text.split("\n") for text in page.locator("#legend li").all_inner_texts()]
    return [float(end.split(" ")[1]) for end, _ in rows][1:], [int(count.replace(",", "")) for _, count in rows]


def test_colors_fit_the_runs_and_the_legend_counts(page, runs):
    """The worst run's scale is that of all runs."""
    worst = runs[2]
    steps, counts = legend(page)
    np.testing.assert_allclose(counts, np.bincount(np.digitize(worst.kld, steps), minlength=9), atol=12)
    assert_colors(page, worst.kld, steps)
    choose(page, "kld", runs[1].label)
    assert legend(page)[0] == steps
    page.select_option("#scale", "chosen")
    np.testing.assert_allclose(legend(page)[0][1::2], np.quantile(runs[1].kld, [0.4, 0.75, 0.94, 0.995]), rtol=0.06)


def test_filters_leave_tokens_and_passages(page, runs):
    worst, reference = runs[2], runs[0].reference_top_token_ids
    changed = worst.top_token_ids != reference
    page.check("#changed")
    assert sum(legend(page)[1]) == changed.sum()
    level = float(np.sort(worst.kld)[-3]) * 0.999
    page.uncheck("#changed")
    page.fill("#above", str(level))
    page.locator("#above").blur()
    ends = np.cumsum(worst.window_sizes)
    windows = sorted(set(np.searchsorted(ends, np.flatnonzero(worst.kld > level), side="right").tolist()))
    # `window 3 · 8 % ...`
    headings = page.locator(".passage > .place").all_inner_texts()
    assert [heading.split(" ")[1] for heading in headings] == [str(window + 1) for window in windows]
    assert (sum(legend(page)[1]), page.locator("#top li").count()) == (3, 3)


def test_a_search_lists_places_and_leads_to_them(page, runs):
    texts = [runs[0].token_texts[int(token)].lower() for token in runs[0].token_ids]
    whole = "".join(texts)
    query = whole[len("".join(texts[:2001])) - 4 :][:9].upper()
    count = whole.count(query.lower())
    page.fill("#search", query)
    expect(page.locator("#top-heading")).to_have_text(f"“{query}”: {count:,} places")
    expect(page.locator("#hits")).to_have_text(f"{count:,}")
    starts = np.cumsum([0, *map(len, texts)])
    first = int(np.searchsorted(starts, whole.index(query.lower()), side="right")) - 1
    page.locator("#top button").first.click()
    assert_focus(page, first)


def test_a_cell_of_the_strip_is_a_window(page, runs):
    starts = np.cumsum(runs[2].window_sizes) - runs[2].window_sizes
    means = np.add.reduceat(runs[2].kld, starts) / runs[2].window_sizes
    cells = page.locator("#strip button")
    darkness = cells.evaluate_all("all => all.map(each => Number(each.className.slice(1)))")
    assert (len(darkness), np.argmax(darkness)) == (NUM_WINDOWS, means.argmax())
    cells.nth(13).click()
    assert 0 < page.locator(".passage", has=token_at(page, int(starts[13]))).bounding_box()["y"] < 300
    assert "window 14 · 54 %" in page.locator("#tip").inner_text()


def test_the_figures_of_a_token_and_the_list_follow_the_colors(page, runs):
    base, _, worst = runs
    token_at(page, 30).hover()
    choose(page, "nll_difference", worst.label, base.label)
    difference = worst.nlls - base.nlls
    words = f"difference of NLL: {worst.label} less {base.label} {difference[30]:+.3f}"
    assert words in page.locator("#token").inner_text()
    amounts = [float(text) for text in page.locator("#top .amount").all_inner_texts()[:5]]
    assert amounts == pytest.approx(difference[np.argsort(-np.abs(difference))[:5]].tolist(), abs=2e-3)
    # The tokens that each would have said instead: for a difference first the reference's, then both runs'.
    header, *rows = page.locator("#token .tops tr").all()
    assert header.locator("th").all_inner_texts()[1:4] == [base.label, worst.label, runs[1].label]
    names = [row.locator("bdi").inner_text() for row in rows]
    token, logprob = worst.top_tokens.token_ids[30, 0, 0], worst.top_tokens.logprobs[30, 0, 0]
    shown = rows[names.index(base.token_texts[int(token)].translate(SIGNS))].locator("td").nth(1).inner_text()
    assert float(shown.split()[0]) == pytest.approx(100 * math.exp(logprob), abs=0.06)


def test_plots_show_values_and_are_saved_and_the_published_table_is_copied(page, runs, tmp_path):
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("#copy")
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("window.copied") == card(compare(runs, num_resamples=10))
    page.locator("#perplexity-ratio [data-tip] use").last.hover()
    ratio = runs[2].nlls.mean() - runs[0].nlls.mean()
    assert page.locator("#tip").inner_text().startswith(f"{runs[2].label}: {ratio:.4g} [")
    files = []
    for name in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.locator("#kl-divergence .save").get_by_text(name).click()
        files.append(tmp_path / download.value.suggested_filename)
        download.value.save_as(files[-1])
    assert "var(" not in files[0].read_text()
    assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")
    assert len(Image.open(files[1]).convert("RGB").getcolors(maxcolors=1 << 20)) > 10
    # A description of the measurement is on the page once, and below every picture.
    words = " ".join(ElementTree.parse(files[0]).getroot().itertext())
    assert "3,000 tokens scored in 24 windows" in " ".join(words.split())


def test_classes_and_domains_are_filters(shown, runs):
    """Tool calls in each window's first ten tokens, reasoning in the next ten; every third window is code."""
    in_window, window = np.arange(NUM_TOKENS) % WINDOW, np.arange(NUM_WINDOWS, dtype=np.int32)
    classes = np.select([in_window < 10, in_window < 20], [2, 1], 0).astype(np.uint8)
    is_code = np.repeat(window % 3 == 0, WINDOW)
    labels = {"labels": [HOSTILE, "unused", "code"], "window_labels": np.where(window % 3, 0, 2).astype(np.int32)}
    prompts = [f"user: {HOSTILE} {index}" for index in range(NUM_WINDOWS)]
    with shown([runs[0], replace(runs[1], classes=classes, prompts=prompts, **labels), runs[2]]) as page:
        assert page.locator(".prompt").all_inner_texts() == prompts
        options = [page.locator(f"#{name} option").all_inner_texts() for name in ("class", "domain")]
        assert options == [["all", "text", "reasoning", "tool call"], ["all", HOSTILE, "code"]]
        page.select_option("#class", label="tool call")
        assert sum(legend(page)[1]) == (classes == 2).sum()
        page.select_option("#domain", label="code")
        assert sum(legend(page)[1]) == ((classes == 2) & is_code).sum()
        page.select_option("#class", label="all")
        assert sum(legend(page)[1]) == is_code.sum()


def with_text(runs, pieces):
    """The runs with tokens of these bytes, over and over, as a server gives the texts of tokens one by one."""
    texts = {token: piece.decode(errors="replace") for token, piece in enumerate(pieces)}
    parts = {token: piece.hex() for token, piece in enumerate(pieces) if "\ufffd" in texts[token]}
    ids = np.resize(np.arange(len(pieces), dtype=np.int32), NUM_TOKENS)
    return [replace(run, token_ids=ids, token_texts=texts, token_bytes=parts, top_tokens=None) for run in runs]


def test_the_bytes_of_a_character_are_joined(shown, runs):
    """German, Chinese and Thai, in tokens of two bytes wherever characters begin and end."""
    text = "Größe 中文字 ภาษา 🙂."
    content = text.encode()
    pieces = [content[start : start + 2] for start in range(0, len(content), 2)]
    with shown(with_text(runs, pieces)) as page:
        assert "".join(token_at(page, at).text_content() for at in range(len(pieces))) == text
        # Every token has a place, and some have only a part of a character.
        assert all(token_at(page, at).bounding_box()["width"] > 1 for at in range(len(pieces)))
        assert page.locator(".tokens .part").count() > 3
        page.fill("#search", "中文字")
        windows = np.split(np.resize(np.arange(len(pieces)), NUM_TOKENS), NUM_WINDOWS)
        texts = [b"".join(pieces[at] for at in window).decode(errors="replace") for window in windows]
        expect(page.locator("#hits")).to_have_text(f"{''.join(texts).count('中文字')}")


def test_line_breaks_of_several_tokens_are_one_mark_and_spaces_are_seen(shown, runs):
    pieces = [b"one", b"\n", b" \n", b"\n", b" two", b"\n", b"  three", b"\t."]
    with shown(with_text(runs, pieces)) as page:
        found = [token_at(page, at).text_content() for at in range(len(pieces))]
        assert found == ["one", "\u00d73", "", "\n", " two", "\n", "  three", "\t."]
        assert page.locator(".tokens .break").nth(1).text_content() == ""
        assert all(token_at(page, at).bounding_box()["width"] > 1 for at in range(len(pieces)))
        assert page.evaluate("getComputedStyle(document.querySelector('.space'), '::before').content") == '"·"'
        tops = [token_at(page, at).bounding_box()["y"] for at in (0, 4, 6)]
        assert tops == sorted(set(tops)), "three lines"


WIDER = """() => [...document.querySelectorAll("main *, header *")].filter((each) => {
  const box = each.getBoundingClientRect();
  const isApart = each.closest(".unseen, option, svg, .scrolls") && !each.matches(".scrolls");
  return !isApart && box.width && box.right > document.documentElement.clientWidth + 0.5;
}).map((each) => each.outerHTML.slice(0, 80))"""
BARS = """() => [...document.querySelectorAll(".scrolls")].filter((each) => each.scrollWidth > each.clientWidth)
  .map((each) => getComputedStyle(each, "::-webkit-scrollbar").height)"""
LINES = """(cell) => [...cell.childNodes].filter((each) => each.nodeType === Node.TEXT_NODE).map((each) => {
  const range = document.createRange();
  range.selectNodeContents(each);
  return range.getClientRects().length;
})"""
"""How many lines each part of a name is on."""


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_without_a_bar(shown, runs, width):
    """At 400 pixels only tables are wider than the page, in boxes that have a bar; names are broken after hyphens."""
    named = [replace(run, label=f"SmolLM2-135M-Instruct-{run.label}") for run in runs]
    with shown(named) as page:
        page.set_viewport_size({"width": width, "height": 860})
        assert page.evaluate(WIDER) == []
        bars = page.evaluate(BARS)
        assert bars == ["10px"] * len(bars)
        assert bool(bars) == (width == 400)
        names = page.locator("th[scope=row]")
        lines = [names.nth(place).evaluate(LINES) for place in range(names.count())]
        assert {count for each in lines for count in each} == {1}
        assert max(map(len, lines)) == 6
