"""The report of a comparison: one file, whose data are those of the runs, and what its tables say."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import MODELS, write_runs
from run_files import OWN, kld_run, made_up_nlls, perplexity_run

from scoremode.comparison import Figure, as_text, compare, load_runs, verdict_line
from scoremode.comparison.figures import with_errors
from scoremode.comparison.report import write_report
from scoremode.comparison.report_tables import pair_matrices, run_table

NUM_TOKENS = 5000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reference's own model and a damaged one."""
    models = (MODELS[0], MODELS[3])
    return load_runs(write_runs(tmp_path_factory.mktemp("runs"), NUM_TOKENS, models=models, vocab_size=500))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A function that writes a report of runs and gives its text. Plots take most of the time."""
    path = tmp_path_factory.mktemp("report") / "report.html"

    def write(runs, *, has_plots=False, **options):
        with pytest.MonkeyPatch.context() as patch:
            if not has_plots:
                patch.setattr("scoremode.comparison.report.plots", lambda comparison: [])
            write_report(compare(runs, num_resamples=20), path, **options)
        return path.read_text()

    return write


@pytest.fixture(scope="module")
def text(runs, report):
    return report(runs, has_plots=True)


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


def test_top_tokens_are_those_where_runs_diverge_most(runs, report):
    data = data_of(report(runs, max_bytes=215_000))
    kept = np.flatnonzero(np.repeat(*(unpacked(data["passages"][name]) for name in ("kept", "size"))))
    order = np.argsort(-sum(run.kld / run.kld.mean() for run in runs))
    num_shown = len(unpacked(data["series"][0]["shown_at"]))
    assert 20 < num_shown < 100
    shown = np.sort(order[np.isin(order, kept)][:num_shown])
    for run, series in zip(runs, data["series"], strict=False):
        assert kept[unpacked(series["shown_at"])].tolist() == shown.tolist()
        ids = unpacked(data["vocabulary"]["ids"])[unpacked(series["shown_tops"])]
        assert ids.tolist() == run.top_tokens.token_ids[shown].ravel().tolist()
        np.testing.assert_allclose(unpacked(series["shown_nlls"]), -run.top_tokens.logprobs[shown].ravel(), atol=1e-3)


def test_infinite_values_stay_infinite_and_equal_ones_equal(runs, report):
    """Though the largest of one run is not that of the other."""
    nlls, kld = runs[0].nlls.copy(), runs[1].kld.copy()
    nlls[10], nlls[11], kld[11] = 2 * nlls.max(), np.inf, np.inf
    one, other = data_of(report([runs[0], replace(runs[1], nlls=nlls, kld=kld)]))["series"]
    assert np.flatnonzero(unpacked(one["nll"]) != unpacked(other["nll"])).tolist() == [10, 11]
    assert [np.flatnonzero(np.isinf(unpacked(other[name]))).tolist() for name in ("nll", "kld")] == [[11], [11]]


def test_without_a_reference_there_is_no_divergence(tmp_path, report):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    text = report([perplexity_run(tmp_path / name, name, made_up_nlls(1)) for name in ("one", "two")], has_plots=True)
    assert "<code>ppl-client compare one/one.json two/two.json " in text
    assert [series["kld"] for series in data_of(text)["series"]] == [None] * 2
    published = re.compile("<textarea.*</textarea>", re.DOTALL)
    assert "KL" not in published.sub("", text).split("<main>")[1].split("<noscript>")[0]


def test_what_was_measured_is_said_once_and_no_internal_name(runs, report):
    name = "sweep-BF16-12881917dbd5"
    named = [replace(run, reference=run.reference.model_copy(update={"name": name})) for run in runs]
    text = report(named, has_plots=True)
    assert (text.count("tokens scored in"), name in text) == (1, False)
    first = text.split("</nav>")[1].split('<h2 id="plots">')[0]
    comparison = compare(named, num_resamples=20)
    sentence = verdict_line(comparison, comparison.runs[1]).removeprefix(runs[1].label)
    # One sentence per copy, and one plot.
    assert (first.count("<li>"), first.count("<svg")) == (1, 1)
    assert f"<b>GPTQ-<wbr>4bit-<wbr>128g</b>{html.escape(sentence)}</li>" in first
    assert 'figure id="kl-divergence"' in first


@pytest.mark.parametrize("has_own_run", [True, False])
def test_the_bases_row_has_no_figure_of_itself(runs, report, has_own_run):
    """Wherever it is: of its own run, which does not diverge, or of the reference alone."""
    own = replace(runs[0], kld=np.zeros(NUM_TOKENS), top_token_ids=runs[0].reference_top_token_ids)
    comparison = compare([own, runs[1]] if has_own_run else [runs[1]], num_resamples=20)
    columns, (base, copy) = run_table(comparison)
    against = [at for at, name in enumerate(columns) if "KL" in name or name in ("PPL ratio", "RMS Δp", "same top p")]
    assert len(against) == 8
    assert {base[at].text for at in against} == {"-"}
    assert "-" not in {copy[at].text for at in against}
    [row] = [line for line in as_text(comparison).split("mean KLD, nats")[1].splitlines() if line.startswith("BF16")][
        :1
    ]
    assert row.split()[1:] == ["-"] * 3
    # The reference is there once.
    series = data_of(report(comparison.files))["series"]
    assert [(each["label"], each["is_reference"], each["kld"] is None) for each in series] == [
        ("BF16", True, True),
        (runs[1].label, False, False),
    ]


def test_a_bounded_report_keeps_the_most_divergent_tokens(runs, report):
    text = report(runs, max_bytes=175_000)
    data = data_of(text)
    kept = unpacked(data["passages"]["kept"]).astype(bool)
    assert len(text.encode()) <= 175_000
    assert 0 < kept.sum() < len(kept) == len(unpacked(data["series"][0]["mean_nll"]))
    positions = np.repeat(kept, unpacked(data["passages"]["size"]))
    assert positions[runs[1].kld.argmax()]
    assert data["num_kept"] == positions.sum() == len(unpacked(data["tokens"]))
    means = [part.mean() for part in np.split(runs[1].nlls, np.cumsum(runs[1].window_sizes)[:-1])]
    np.testing.assert_allclose(unpacked(data["series"][1]["mean_nll"]), means, rtol=1e-6)
    assert f"The text of {positions.sum():,} of {NUM_TOKENS:,} tokens" in text
    # In the file, "<" takes six bytes.
    texts = dict.fromkeys(runs[0].token_texts, "<" * 40)
    text = report([replace(run, token_texts=texts) for run in runs], max_bytes=275_000)
    assert (len(text.encode()) <= 275_000, data_of(text)["num_kept"] > 0) == (True, True)
    prompts = ["<" * 9999] * runs[0].num_windows
    text = report([replace(run, prompts=prompts) for run in runs], max_bytes=275_000)
    assert (len(text.encode()) <= 275_000, set(data_of(text)["prompts"].values())) == (True, {"<" * 4000})
    alone = report(runs[:1], max_bytes=1)
    assert ('id="pairs"' in alone, data_of(alone)["num_kept"]) == (False, 0)


def test_text_never_becomes_markup(runs, report):
    hostile = "<script>alert(1)</script><!--"
    texts = dict.fromkeys(runs[0].token_texts, hostile)
    text = report(
        [replace(run, label=f"{hostile}{place}", token_texts=texts) for place, run in enumerate(runs)], has_plots=True
    )
    assert hostile not in text
    assert html.escape(hostile) in text
    assert text.count("<script") == text.count("</script>") == 2, "the data, and the script"
    assert text.count("<!--") == 0
    assert data_of(text)["vocabulary"]["texts"][0] == hostile


def test_the_policy_allows_only_what_the_report_contains(text):
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1])
    contents = [re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1].encode() for tag in ("style", "script")]
    style, script = (f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in contents)
    sources = f"default-src 'none'; style-src {style}; script-src {script}; img-src data:"
    assert policy == f"{sources}; base-uri 'none'; form-action 'none'"


def test_each_pair_is_in_the_matrix_both_ways_round(tmp_path):
    """The runs are a base, one that is clearly worse, and one that is as good."""
    nlls = made_up_nlls(0)
    base = kld_run(tmp_path, "base", nlls, np.full(len(nlls), 1e-6), server=OWN)
    worse = kld_run(tmp_path, "worse", nlls + 0.3, np.where(np.arange(len(nlls)) % 4, 0.05, 0.25))
    alike = kld_run(tmp_path, "alike", made_up_nlls(1), np.full(len(nlls), 0.01))
    comparison = compare([base, worse, alike], num_resamples=100)
    by_ratio, by_kld = pair_matrices(comparison)
    assert by_ratio.labels == ["base", "worse", "alike"]
    # Against the original there is no verdict.
    marks = [["", "", ""], ["", "", "worse"], ["", "better", ""]]
    assert [[cell.mark for cell in row] for row in by_ratio.rows] == marks
    assert by_ratio.rows[1][0].tip.startswith("worse against base by perplexity: 1.3")
    write_report(comparison, tmp_path / "report.html")
    colored = re.findall(r'<td class="(?:better|worse)".*?</td>', (tmp_path / "report.html").read_text())
    # No color stands without its word.
    assert len(colored) == 4
    assert all(re.search(r"<small>(better|worse)</small></td>", cell) for cell in colored)
    pair = comparison.pairs[0].ppl_ratio
    inverse = by_ratio.rows[0][1]
    assert inverse.value == pytest.approx(1 / pair.value)
    low, high = (float(end) for end in re.search(r"\[(.*), (.*)\]", inverse.tip).groups())
    assert (low, high) == (pytest.approx(1 / pair.high, rel=1e-3), pytest.approx(1 / pair.low, rel=1e-3))
    assert by_kld.rows[0][1].value == -by_kld.rows[1][0].value


@pytest.mark.parametrize(
    ("figure", "text", "errors"),
    [
        (Figure(0.0037, 6.39e-05, 0.0035, 0.0039), "0.003700", ("± 0.000064", "[0.003500, 0.003900]")),
        (Figure(20.4267, 0.114, 20.23, 20.6442), "20.43", ("± 0.11", "[20.23, 20.64]")),
        (Figure(1234.5, 56.7, None, None), "1,234", ("± 57",)),
        (Figure(1.1e-12, 2e-13, -1e-12, 2e-12), "0", ()),
    ],
)
def test_a_figure_has_the_digits_that_its_error_leaves(figure, text, errors):
    cell = with_errors(figure)
    assert (cell.text, cell.errors) == (text, errors)
