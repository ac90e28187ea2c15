"""The report of a comparison: one file, whose data are those of the runs."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import MODELS, write_runs

from scoremode.comparison import compare, load_runs, passages
from scoremode.comparison.passages import MAX_TOKENS, cut_passages
from scoremode.comparison.plot_style import DARK, LIGHT
from scoremode.comparison.report import write_report

NUM_TOKENS = 5000
TINY = 1e-12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reference's own model and a damaged one."""
    return load_runs(
        write_runs(tmp_path_factory.mktemp("runs"), NUM_TOKENS, models=(MODELS[0], MODELS[3]), vocab_size=500)
    )


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
    """The report of both."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(compare(runs, num_resamples=20), path)
    return path.read_text()


@pytest.fixture
def report(tmp_path):
    """Writes a report of runs and gives its text."""

    def write(runs, **options):
        write_report(compare(runs, num_resamples=20), tmp_path / "report.html", **options)
        return (tmp_path / "report.html").read_text()

    return write


def data_of(text):
    """The JSON inside a report."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def unpacked(packed):
    """As docs and page say: little-endian, `values * scale`, 65,535 of scaled uint16 is infinity."""
    kinds = {"uint16": "<u2", "int32": "<i4", "float16": "<f2", "float32": "<f4"}
    values = np.frombuffer(base64.b64decode(packed["data"]), kinds[packed["type"]])
    if packed["scale"] is None:
        return values
    scaled = values.astype(float) * packed["scale"]
    return np.where(values == 65535, np.inf, scaled) if packed["type"] == "uint16" else scaled


def test_the_values_of_every_token_are_those_of_the_runs(runs, text):
    data = data_of(text)
    ids = unpacked(data["vocabulary"]["ids"])

    assert np.array_equal(ids[unpacked(data["tokens"])], runs[0].token_ids)
    for run, series in zip(runs, data["series"], strict=False):
        # NLLs are rounded to a 65,534th of the largest of all, KL divergences to 11 bits.
        step = max(runs[0].reference_nlls.max(), *(run.nlls.max() for run in runs)) / 65534
        assert np.abs(unpacked(series["nll"]) - run.nlls).max() <= step / 2 + TINY
        np.testing.assert_allclose(unpacked(series["kld"]), run.kld, rtol=2**-11, atol=2**-24 / 512)
        assert np.array_equal(unpacked(series["ranks"]), run.ranks)
        assert np.array_equal(ids[unpacked(series["tops"])], run.top_token_ids)
    reference = data["series"][2]
    assert reference["is_reference"]
    assert np.array_equal(ids[unpacked(reference["tops"])], runs[0].reference_top_token_ids)
    assert np.abs(unpacked(reference["confidence"]) - runs[0].reference_confidence).max() < 1e-5
    assert np.abs(unpacked(reference["nll"]) - runs[0].reference_nlls).max() < 1e-3


def test_every_passage_has_its_means(runs, text):
    data = data_of(text)
    starts = np.cumsum(runs[1].window_sizes) - runs[1].window_sizes

    means = [runs[1].kld[start : start + size].mean() for start, size in zip(starts, runs[1].window_sizes, strict=True)]

    np.testing.assert_allclose(unpacked(data["series"][1]["mean_kld"]), means, rtol=1e-6)


def test_tokens_have_their_texts(runs, text):
    data = data_of(text)
    ids = unpacked(data["vocabulary"]["ids"])
    assert data["vocabulary"]["texts"] == [runs[0].token_texts.get(int(token)) for token in ids]
    assert " the" in data["vocabulary"]["texts"]


def test_an_infinite_value_stays_infinite(runs, report):
    nlls, kld = runs[1].nlls.copy(), runs[1].kld.copy()
    nlls[10] = kld[10] = np.inf
    data = data_of(report([runs[0], replace(runs[1], nlls=nlls, kld=kld)]))
    assert unpacked(data["series"][1]["nll"])[10] == np.inf
    assert unpacked(data["series"][1]["kld"])[10] == np.inf
    assert np.isinf(unpacked(data["series"][1]["nll"])).sum() == 1


def test_equal_values_of_two_runs_stay_equal(runs, report):
    """Though the largest of one run is not that of the other."""
    nlls = runs[0].nlls.copy()
    nlls[10] = 2 * nlls.max()
    one, other, _ = data_of(report([runs[0], replace(runs[1], nlls=nlls)]))["series"]
    assert np.flatnonzero(unpacked(one["nll"]) != unpacked(other["nll"])).tolist() == [10]


def test_a_report_of_runs_without_a_reference(runs, report):
    def without_reference(run):
        record = {
            **run.record,
            "kind": "perplexity",
            "corpus": {"name": "a text", "sha256": "0" * 64},
            "settings": {"method": "sliding", "context_length": 2048, "stride": 512, "add_special_tokens": True},
            "num_tokens": NUM_TOKENS + 1,
            "num_bytes": 4 * NUM_TOKENS,
        }
        nothing = dict.fromkeys(
            ["kld", "reference_nlls", "top_token_ids", "reference_top_token_ids", "reference_confidence"]
        )
        return replace(run, kind="perplexity", record=record, **nothing)

    text = report([without_reference(run) for run in runs])

    data = data_of(text)
    assert [series["label"] for series in data["series"]] == [run.label for run in runs]
    assert data["series"][0]["kld"] is None
    assert data["largest_kld"] is None
    assert "a text" in text
    assert "KL" not in text.split("<main>")[1].split("<noscript>")[0]


def test_a_report_of_one_run(runs, report):
    text = report(runs[:1])
    assert len(data_of(text)["series"]) == 2
    assert 'id="pairs"' not in text


@pytest.mark.parametrize("max_bytes", [280_000, 330_000])
def test_a_bounded_report_keeps_the_most_divergent_tokens(runs, report, max_bytes):
    text = report(runs, max_bytes=max_bytes)

    data = data_of(text)
    kept = unpacked(data["passages"]["kept"]).astype(bool)
    assert len(text.encode()) <= max_bytes
    assert 0 < kept.sum() < len(kept)
    assert len(unpacked(data["series"][0]["mean_nll"])) == len(kept)
    positions = np.repeat(kept, unpacked(data["passages"]["size"]))
    assert positions[runs[1].kld.argmax()]
    assert data["num_kept"] == positions.sum() == len(unpacked(data["tokens"]))
    assert f"The text of {positions.sum():,} of {NUM_TOKENS:,} tokens" in text


def test_a_bound_that_leaves_no_room_for_text_keeps_none(runs, report):
    data = data_of(report(runs, max_bytes=1))
    assert data["num_kept"] == 0
    assert not unpacked(data["passages"]["kept"]).any()


def test_long_windows_are_cut_into_passages():
    passages = cut_passages(np.array([5, 0, 2 * MAX_TOKENS + 1], np.int32))
    assert passages.window.tolist() == [0, 2, 2, 2]
    assert passages.first.tolist() == [0, 0, MAX_TOKENS, 2 * MAX_TOKENS]
    assert passages.start.tolist() == [0, 5, 5 + MAX_TOKENS, 5 + 2 * MAX_TOKENS]
    assert passages.size.tolist() == [5, MAX_TOKENS, MAX_TOKENS, 1]


def test_very_many_short_windows_share_passages(monkeypatch):
    monkeypatch.setattr(passages, "MAX_PASSAGES", 4)
    joined = cut_passages(np.array([0, 1000, 20, 0, 4, 1, MAX_TOKENS + 2, 3, 3], np.int32))
    assert joined.window.tolist() == [1, 5, 6, 6, 7]
    assert joined.last_window.tolist() == [4, 5, 6, 6, 8]
    assert joined.first.tolist() == [0, 0, 0, MAX_TOKENS, 0]
    assert joined.start.tolist() == [0, 1024, 1025, 1025 + MAX_TOKENS, 1027 + MAX_TOKENS]
    assert joined.size.tolist() == [1024, 1, MAX_TOKENS, 2, 6]


def test_a_bound_holds_for_windows_of_one_token(runs, report, monkeypatch):
    monkeypatch.setattr(passages, "MAX_PASSAGES", 100)
    tiny = [replace(run, window_sizes=np.ones(NUM_TOKENS, np.int32)) for run in runs]
    text = report(tiny, max_bytes=280_000)
    data = data_of(text)
    assert len(text.encode()) <= 280_000
    assert 0 < data["num_kept"] < NUM_TOKENS
    assert unpacked(data["passages"]["last_window"]).tolist() == [1023, 2047, 3071, 4095, 4999]


def test_text_never_becomes_markup(runs, report):
    hostile = "<script>alert(1)</script><!--"
    texts = dict.fromkeys(runs[0].token_texts, hostile)
    named = [replace(run, label=f"{hostile}{place}", token_texts=texts) for place, run in enumerate(runs)]

    text = report(named)

    assert hostile not in text
    assert html.escape(hostile) in text
    # The data, and the script: those of the template and no other.
    assert text.count("<script") == text.count("</script>") == 2
    assert text.count("<!--") == 0
    assert data_of(text)["vocabulary"]["texts"][0] == hostile


def test_the_policy_lets_nothing_run_but_what_the_report_brings(text):
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1])

    def hashed(pattern):
        content = re.search(pattern, text, re.DOTALL)[1].encode()
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    assert dict(directive.split(" ", 1) for directive in policy.split("; ")) == {
        "default-src": "'none'",
        "style-src": hashed("<style>(.*?)</style>"),
        "script-src": hashed("<script>(.*?)</script>"),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    # The policy would block such attributes, in plots too.
    assert not re.search(r"<[^>]*\s(style|on\w+)=", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL))


def test_it_names_nothing_outside_of_it(text):
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import""", text)
    assert outside == []


def test_ids_are_unique(text):
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


# --- Colours ---


def scheme_colours(text):
    """The variables of both schemes, from the style sheet."""
    blocks = dict(zip(("light", "dark"), re.findall(r":root \{(.*?)\}", text, re.DOTALL), strict=True))
    return {scheme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for scheme, block in blocks.items()}


def contrast(one, other):
    """Of WCAG 2."""

    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_every_colour(text, scheme):
    colours = scheme_colours(text)[scheme]
    names = [f"{scale}{step}" for scale in "sd" for step in range(9)]
    low = {name: round(contrast(colours[name], colours[f"{name}-text"]), 2) for name in names}
    assert {name: ratio for name, ratio in low.items() if ratio < 4.5} == {}
    for name in ("ink", "quiet", "link", "better", "worse"):
        assert contrast(colours[name], colours["paper"]) >= 4.5
        assert contrast(colours[name], colours["raised"]) >= 4.5
    # The names of runs in plots.
    for index in range(len(LIGHT.runs)):
        assert contrast(colours[f"plot-run-{index}"], colours["plot-paper"]) >= 4.5


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
def test_plots_in_the_page_have_the_colours_of_their_files(text, scheme, theme):
    colours = scheme_colours(text)[scheme]
    assert [colours[f"plot-run-{index}"] for index in range(len(theme.runs))] == list(theme.runs)
    for name in ("paper", "ink", "quiet", "grid"):
        assert colours[f"plot-{name}"] == getattr(theme, name)


def test_no_colour_of_a_plot_is_left_as_it_was_drawn(text):
    """A colour that is no variable would stay as it is in the other scheme."""
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
        assert "var(--plot-ink)" in svg
