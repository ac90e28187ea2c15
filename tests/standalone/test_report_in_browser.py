"""The report in a real browser, opened from disk."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import MODELS, write_runs
from playwright.sync_api import expect

from scoremode.comparison import compare, load_runs, passages
from scoremode.comparison.report import write_report
from tests.browser import visit

NUM_TOKENS = 3000
NUM_WINDOWS = 24
HOSTILE = "<script>alert(1)</script>"
ARABIC = " السلام"
# What the legend says, in nats.
NLL_STEPS = [0.1, 0.5, 1, 2, 3, 5, 7, 10]
KLD_STEPS = [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
DIFFERENCE_STEPS = [-1, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reference's own model and two others; one token's text is a script, another's is Arabic."""
    folder = tmp_path_factory.mktemp("runs")
    paths = write_runs(folder, NUM_TOKENS, models=(MODELS[0], MODELS[3], MODELS[5]), vocab_size=300, context_length=500)
    found = load_runs(paths)
    texts = {**found[0].token_texts, 2: HOSTILE, 3: ARABIC}
    return [replace(run, token_texts=texts) for run in found]


@pytest.fixture(scope="module")
def url(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(compare(runs, num_resamples=50), path)
    return path.as_uri()


@pytest.fixture
def opened(browser, url):
    """The report in a page, and what it asked for and complained about: nothing."""
    with visit(browser, viewport={"width": 1280, "height": 900}) as seen:
        seen.page.goto(url)
        seen.page.wait_for_selector(".tokens span")
        yield seen
        assert seen.requests == [url]
        assert seen.errors == []


@pytest.fixture
def page(opened):
    return opened.page


def backgrounds(page, passage=0):
    """The colours of a passage's tokens, as they are on the screen."""
    return page.locator(".tokens").nth(passage).locator("span").evaluate_all(
        "tokens => tokens.map(token => getComputedStyle(token).backgroundColor)"
    )  # fmt: skip


def scale(page, letter):
    """The colours of a scale, from the legend's style variables."""
    names = [f"--{letter}{step}" for step in range(9)]
    values = page.evaluate(
        "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue(name))", names
    )
    return [f"rgb({int(value[1:3], 16)}, {int(value[3:5], 16)}, {int(value[5:7], 16)})" for value in values]


def assert_colours(page, values, steps, letter):
    """That the first passage's tokens have the colours of the values, but for those as near to a step as rounding."""
    found, colours = backgrounds(page), scale(page, letter)
    clear = np.abs(values[:, None] - np.array(steps)).min(axis=1) > 1e-3 * np.minimum(np.abs(values), 1)
    expected = [colours[sum(value >= step for step in steps)] for value in values]
    assert clear.mean() > 0.9
    assert len(set(found)) > 2
    assert [one for one, sure in zip(found, clear, strict=True) if sure] == [
        one for one, sure in zip(expected, clear, strict=True) if sure
    ]


def first_passage(run, values):
    return values[: run.window_sizes[0]]


def test_it_opens_from_disk_and_asks_for_nothing_else(page, runs):
    assert page.title() == ", ".join(run.label for run in runs)
    assert page.locator("figure svg").count() == 5
    assert page.locator(".passage").count() == NUM_WINDOWS


def test_plots_have_the_colours_of_the_scheme(browser, url):
    seen = {}
    for scheme in ("light", "dark"):
        with visit(browser, color_scheme=scheme) as visited:
            visited.page.goto(url)
            seen[scheme] = [
                visited.page.locator(selector).first.evaluate(f"one => getComputedStyle(one).{name}")
                for selector, name in (
                    ("figure svg path", "fill"),
                    ("figure svg text", "fill"),
                    ("body", "backgroundColor"),
                )
            ]
    paper, ink = "rgb(255, 255, 255)", "rgb(27, 31, 36)"
    assert seen["light"] == [paper, ink, paper]
    paper, ink = "rgb(20, 23, 28)", "rgb(232, 235, 239)"
    assert seen["dark"] == [paper, ink, paper]


def test_the_table_sorts_by_a_column(page, runs):
    rows = page.locator("#runs ~ .scrolls tbody th")
    header = page.locator("#runs ~ .scrolls thead th", has_text="perplexity")
    by_nll = [run.label for run in sorted(runs, key=lambda run: run.nlls.mean())]

    assert rows.all_inner_texts() == [run.label for run in runs]
    header.locator("button").click()
    assert (rows.all_inner_texts(), header.get_attribute("aria-sort")) == (by_nll, "ascending")
    header.locator("button").press("Enter")
    assert (rows.all_inner_texts(), header.get_attribute("aria-sort")) == (by_nll[::-1], "descending")
    page.locator("#runs ~ .scrolls thead button").first.press("Space")
    assert (rows.all_inner_texts(), header.get_attribute("aria-sort")) == (sorted(run.label for run in runs), None)


def test_what_is_not_known_sorts_last_both_ways(page, runs):
    """The base has no ratio to itself."""
    header = page.locator("#runs ~ .scrolls thead th", has_text="PPL ratio")
    for _ in range(2):
        header.locator("button").click()
        assert page.locator("#runs ~ .scrolls tbody th").last.inner_text() == runs[0].label


def test_infinite_figures_sort_as_the_largest(browser, runs, tmp_path):
    infinite = [replace(run, nlls=np.where(np.arange(NUM_TOKENS) == 10, np.inf, run.nlls)) for run in runs[:2]]
    write_report(compare([*infinite, runs[2]], num_resamples=10), tmp_path / "infinite.html")
    with visit(browser) as visited:
        visited.page.goto((tmp_path / "infinite.html").as_uri())
        rows = visited.page.locator("#runs ~ .scrolls tbody th")
        header = visited.page.locator("#runs ~ .scrolls thead th", has_text="perplexity")
        header.locator("button").click()
        assert rows.all_inner_texts()[0] == runs[2].label
        header.locator("button").click()
        assert rows.all_inner_texts()[2] == runs[2].label


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_have_the_colours_of_their_values(browser, url, runs, scheme):
    base, _, worst = runs
    with visit(browser, color_scheme=scheme) as visited:
        page = visited.page
        page.goto(url)
        page.wait_for_selector(".tokens span")
        # First shown is the KL divergence of the run that has most.
        assert page.locator("#measure").input_value() == "kld"
        assert_colours(page, first_passage(worst, worst.kld), KLD_STEPS, "s")

        page.select_option("#measure", "nll")
        page.select_option("#first", label=base.label)
        assert_colours(page, first_passage(base, base.nlls), NLL_STEPS, "s")

        page.select_option("#first", label="reference base-made-up")
        assert_colours(page, first_passage(base, base.reference_nlls), NLL_STEPS, "s")

        page.select_option("#measure", "nll_difference")
        page.select_option("#first", label=worst.label)
        page.select_option("#second", label=base.label)
        assert_colours(page, first_passage(base, worst.nlls - base.nlls), DIFFERENCE_STEPS, "d")

        page.select_option("#measure", "kld_difference")
        page.select_option("#first", label=base.label)
        page.select_option("#second", label=worst.label)
        assert_colours(page, first_passage(base, base.kld - worst.kld), DIFFERENCE_STEPS, "d")
        assert visited.errors == []


def test_the_legend_says_what_the_colours_are(page):
    items = page.locator("#legend li")
    assert items.all_inner_texts()[0] == "below 0.0001"
    assert items.all_inner_texts()[4:6] == ["0.01 to 0.03", "0.03 to 0.1"]
    found = items.evaluate_all("items => items.map(item => getComputedStyle(item).backgroundColor)")
    assert found == scale(page, "s")


def test_the_reference_has_no_divergence_to_choose(page):
    disabled = page.locator("#first option").evaluate_all("all => all.map(option => option.disabled)")
    assert disabled == [False, False, False, True]


def figures(page):
    """The table of the chosen token, by the run's name."""
    rows = page.locator("#token tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def assert_figures(page, runs, position):
    """That the panel shows what each run has at a position."""
    found = figures(page)
    text = runs[0].token_texts
    assert list(found) == [*(run.label for run in runs), "reference base-made-up"]
    for run in runs:
        logprob, probability, rank, kld, prefers = found[run.label]
        # Shown to three digits after the point, from NLLs rounded to a 65,534th of the largest.
        assert float(logprob) == pytest.approx(-run.nlls[position], abs=1e-3)
        assert float(probability.split()[0]) == pytest.approx(100 * math.exp(-run.nlls[position]), rel=0.6, abs=0.06)
        assert int(rank.replace(",", "")) == run.ranks[position]
        assert float(kld) == pytest.approx(run.kld[position], abs=6e-4, rel=2e-3)
        assert prefers.strip() == text[int(run.top_token_ids[position])].strip().replace("\n", "↵") or "↵" in prefers
    _, _, rank, kld, prefers = found["reference base-made-up"]
    assert (rank, kld) == ("-", "-")
    assert f"({100 * runs[0].reference_confidence[position]:.1f} %)" in prefers
    assert page.locator("#token .shown").inner_text().strip() == text[int(runs[0].token_ids[position])].strip()


def shown_position(runs):
    """A place in the first passage whose tokens are all words."""
    odd = {2, 3, 7}
    arrays = [runs[0].token_ids, runs[0].reference_top_token_ids, *(run.top_token_ids for run in runs)]
    return next(at for at in range(20, 120) if not any(int(array[at]) in odd for array in arrays))


def test_hover_shows_the_figures_of_every_run(page, runs):
    position = shown_position(runs)
    assert page.locator("#token").inner_text() == "No token chosen."
    page.locator(f'[data-position="{position}"]').hover()
    expect(page.locator("#token")).not_to_have_text("No token chosen.")
    assert_figures(page, runs, position)


def test_the_keyboard_reaches_every_token(page, runs):
    position = shown_position(runs)
    page.locator(".passage > summary").first.focus()
    page.keyboard.press("Tab")
    for _ in range(position):
        page.keyboard.press("ArrowRight")
    assert_figures(page, runs, position)
    assert "logprob" in page.locator("#spoken").inner_text()
    page.keyboard.press("ArrowLeft")
    assert_focus(page, position - 1)
    page.keyboard.press("Home")
    assert_focus(page, 0)
    page.keyboard.press("End")
    assert_focus(page, int(runs[0].window_sizes[0]) - 1)
    # Tab leaves the passage, and comes back to the same token.
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert_focus(page, int(runs[0].window_sizes[0]) - 1)


def assert_focus(page, position):
    expect(page.locator(":focus")).to_have_attribute("data-position", str(position))


def test_windows_are_drawn_as_they_are_opened(page, runs):
    assert page.locator(".tokens").count() == 1
    page.locator(".passage > summary").nth(3).click()
    # As soon as the browser says that a window is open, which it does later than it opens it.
    expect(page.locator(".tokens")).to_have_count(2)
    assert page.locator(".tokens").nth(1).locator("span").count() == runs[0].window_sizes[3]
    assert page.locator(".passage > summary").nth(3).inner_text().startswith("Window 4, tokens 1 to 125: ")


def test_it_jumps_to_the_most_divergent_token(page, runs):
    worst = runs[2]
    position = int(worst.kld.argmax())
    first = page.locator("#top button").first
    assert f"{worst.kld[position]:.4f}"[:4] in first.inner_text()
    first.click()
    assert_focus(page, position)
    token = page.locator(f'[data-position="{position}"]')
    window = int(np.searchsorted(np.cumsum(worst.window_sizes), position, side="right"))
    assert token.evaluate("token => token.closest('details').open")
    assert token.evaluate("token => token.closest('details').firstChild.textContent").startswith(
        f"Window {window + 1}, "
    )
    box = token.bounding_box()
    assert 0 <= box["y"] <= 900
    assert float(figures(page)[worst.label][3]) == pytest.approx(worst.kld[position], rel=2e-3)


def test_the_list_goes_with_what_is_coloured(page, runs):
    _, other, worst = runs
    page.select_option("#measure", "nll_difference")
    page.select_option("#first", label=other.label)
    page.select_option("#second", label=worst.label)
    difference = other.nlls - worst.nlls
    order = np.argsort(-np.abs(difference))[:5]
    amounts = [float(text) for text in page.locator("#top .amount").all_inner_texts()[:5]]
    assert amounts == pytest.approx(difference[order].tolist(), abs=2e-3)


def test_passages_can_come_by_their_means(page, runs):
    worst = runs[2]
    page.select_option("#order", "divergent")
    starts = np.cumsum(worst.window_sizes) - worst.window_sizes
    order = np.argsort(-np.add.reduceat(worst.kld, starts) / worst.window_sizes)
    shown = [text.split(",")[0] for text in page.locator(".passage > summary").all_inner_texts()[:4]]
    assert shown == [f"Window {window + 1}" for window in order[:4]]


def test_a_script_in_the_text_stays_text(page, runs):
    position = int(np.flatnonzero(first_passage(runs[0], runs[0].token_ids) == 2)[0])
    token = page.locator(f'[data-position="{position}"]')
    assert token.inner_text() == HOSTILE
    token.hover()
    assert page.locator("#token .shown").inner_text() == HOSTILE
    assert page.locator("script").count() == 2


def test_right_to_left_text_is_read_from_the_right(browser, runs, tmp_path):
    """In a passage of Arabic words the first is at the right, and each stays whole."""
    ids = np.full(NUM_TOKENS, 3, np.int32)
    write_report(compare([replace(run, token_ids=ids) for run in runs], num_resamples=10), tmp_path / "arabic.html")
    with visit(browser, viewport={"width": 1280, "height": 900}) as visited:
        visited.page.goto((tmp_path / "arabic.html").as_uri())
        visited.page.wait_for_selector(".tokens span")
        first, second, third = (
            visited.page.locator(f'[data-position="{position}"]').bounding_box() for position in range(3)
        )
        assert first["x"] > second["x"] > third["x"]
        assert visited.page.locator('[data-position="0"]').inner_text().strip() == ARABIC.strip()
        assert visited.errors == []


def test_tokens_without_text_are_shown_as_their_ids(browser, runs, tmp_path):
    path = tmp_path / "ids.html"
    write_report(compare([replace(run, token_texts={}) for run in runs], num_resamples=10), path)
    with visit(browser) as visited:
        visited.page.goto(path.as_uri())
        visited.page.wait_for_selector(".tokens span")
        shown = visited.page.locator(".tokens span").all_inner_texts()
        assert shown == [f"⟨{token}⟩" for token in first_passage(runs[0], runs[0].token_ids)]
        assert visited.errors == []


def test_a_passage_that_was_left_out_has_its_mean(browser, runs, tmp_path):
    path = tmp_path / "bounded.html"
    write_report(compare(runs, num_resamples=10), path, max_bytes=300_000)
    assert path.stat().st_size <= 300_000
    worst = runs[2]
    with visit(browser) as visited:
        page = visited.page
        page.goto(path.as_uri())
        page.wait_for_selector(".passage")
        left_out = page.locator(".passage > p")
        assert 0 < left_out.count() < NUM_WINDOWS
        line = left_out.first
        assert line.inner_text().endswith("Its text is left out.")
        window = int(line.inner_text().split(",")[0].removeprefix("Window ")) - 1
        start = int(worst.window_sizes[:window].sum())
        mean = worst.kld[start : start + worst.window_sizes[window]].mean()
        assert float(line.locator(".chip").inner_text()) == pytest.approx(mean, abs=1e-4)
        # The most divergent token of all was kept.
        page.locator("#top button").first.click()
        assert float(figures(page)[worst.label][3]) == pytest.approx(worst.kld.max(), rel=2e-3)
        assert visited.errors == []


def test_the_first_passage_that_was_kept_is_open_though_it_is_far_down(browser, runs, tmp_path):
    """The page draws 40 passages at first, and here the last 30 of 100 diverge."""
    sizes = np.full(100, NUM_TOKENS // 100, np.int32)
    kld = np.where(np.arange(NUM_TOKENS) >= 70 * sizes[0], 1.0, 0.0)
    cut = [replace(run, window_sizes=sizes, kld=kld) for run in runs]
    comparison = compare(cut, num_resamples=10)
    write_report(comparison, tmp_path / "whole.html")
    write_report(comparison, tmp_path / "cut.html", max_bytes=(tmp_path / "whole.html").stat().st_size - 100_000)
    with visit(browser) as visited:
        visited.page.goto((tmp_path / "cut.html").as_uri())
        visited.page.wait_for_selector(".tokens span")
        assert visited.page.locator("#top-heading").inner_text().endswith(" in the text kept here")
        opened = visited.page.locator("details[open] summary").inner_text()
        assert int(opened.split(",")[0].removeprefix("Window ")) > 70
        assert visited.errors == []


def test_a_passage_of_several_windows_names_the_first_and_the_last(browser, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "MAX_PASSAGES", NUM_WINDOWS - 1)
    write_report(compare(runs, num_resamples=10), tmp_path / "joined.html")
    with visit(browser) as visited:
        visited.page.goto((tmp_path / "joined.html").as_uri())
        headings = visited.page.locator(".passage > summary").all_inner_texts()
        assert [heading.split(":")[0] for heading in headings] == [
            "Windows 1 to 8, tokens 1 to 1,000",
            "Windows 9 to 16, tokens 1 to 1,000",
            "Windows 17 to 24, tokens 1 to 1,000",
        ]
        visited.page.locator('[data-position="130"]').hover()
        assert "windows 1 to 8, position 131;" in visited.page.locator("#token").inner_text()
        assert visited.errors == []


def test_a_line_break_has_its_sign_where_it_is(browser, runs, tmp_path):
    texts = {**runs[0].token_texts, int(runs[0].token_ids[0]): "one \n\ntwo"}
    write_report(compare([replace(run, token_texts=texts) for run in runs], num_resamples=10), tmp_path / "breaks.html")
    with visit(browser) as visited:
        visited.page.goto((tmp_path / "breaks.html").as_uri())
        visited.page.wait_for_selector(".tokens span")
        parts = visited.page.locator('[data-position="0"]').evaluate(
            "token => [...token.childNodes].map(node => node.className === 'break'"
            " ? getComputedStyle(node, '::before').content : node.textContent)"
        )
        assert parts == ["one ", '"↵"', "\n", '"↵"', "\ntwo"]


def test_divergences_from_different_references_have_no_difference(browser, runs, tmp_path):
    reference = {**runs[2].record["reference"], "fingerprint": "of another model"}
    other = replace(runs[2], record={**runs[2].record, "reference": reference})
    for name, chosen in (("three", [*runs[:2], other]), ("two", [runs[0], other])):
        write_report(compare(chosen, num_resamples=10), tmp_path / f"{name}.html")
    with visit(browser) as visited:
        page = visited.page
        page.goto((tmp_path / "two.html").as_uri())
        assert page.locator("#measure option[value=kld_difference]").count() == 0
        page.goto((tmp_path / "three.html").as_uri())
        page.select_option("#measure", "kld_difference")
        offered = page.locator("#first option").evaluate_all("all => all.map(option => !option.disabled)")
        assert offered == [True, True, False, False, False]
        assert {page.locator(f"#{name}").input_value() for name in ("first", "second")} == {"0", "1"}
        assert visited.errors == []


def test_it_prints_in_light_colours_without_its_controls(browser, url):
    with visit(browser, color_scheme="dark") as visited:
        visited.page.goto(url)
        visited.page.emulate_media(media="print", color_scheme="dark")
        assert not visited.page.locator(".controls").is_visible()
        assert visited.page.locator("figure svg").first.is_visible()
        assert visited.page.locator("body").evaluate("body => getComputedStyle(body).color") == "rgb(27, 31, 36)"
