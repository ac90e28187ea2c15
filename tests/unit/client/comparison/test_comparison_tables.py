"""Tables of a comparison: the figures that they are made of, in forms for people and for programs."""

import csv
import io
import math

import numpy as np
import pytest
from run_files import made_up_nlls, made_up_reference, write_kld_run, write_perplexity_run

from scoremode.comparison import compare, load_run, summary
from scoremode.comparison.tables import as_csv, as_markdown, as_text

SIZE = {"weight_bytes": 1_500_000_000, "num_parameters": 3_000_000_000, "quantization": "awq"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A base that was not compared with a reference, a run just like it, and a worse one whose server said its size."""
    folder = tmp_path_factory.mktemp("runs")
    kld = np.random.default_rng(1).exponential(0.01, 3000)
    reference = made_up_reference(noise_floor=0.02)
    write_perplexity_run(folder / "base.json", made_up_nlls(1))
    write_kld_run(folder / "int8.json", made_up_nlls(2), kld, reference=reference)
    write_kld_run(folder / "int4.json", made_up_nlls(3, shift=0.1), 20 * kld, reference=reference, server=SIZE)
    return compare([load_run(folder / f"{name}.json", name) for name in ("base", "int8", "int4")], num_resamples=500)


def test_text_fits_in_120_columns(comparison):
    lines = as_text(comparison).splitlines()
    assert max(map(len, lines[: lines.index("")])) <= 120
    tables = [line for line in lines if not line.endswith(".")]
    assert max(map(len, tables)) <= 120


def test_text_has_every_run_and_every_pair(comparison):
    text = as_text(comparison)
    base, int8, int4 = comparison.runs
    perplexity, ratio = int4.perplexity, comparison.pairs[1].ppl_ratio
    assert (
        f"{perplexity.value:.4f} ± {perplexity.stderr:.4f} [{perplexity.low:.4f}, {perplexity.high:.4f}]  "
        f"{ratio.value:.4f} ± {ratio.stderr:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
    ) in text
    rows = [line.split() for line in text.splitlines()]
    assert ["base", "not", "quantized,", "float32", "-", "-"] in [row[:6] for row in rows]
    assert ["int4", "awq,", "float32", "1.500", "4.00"] in [row[:5] for row in rows]
    assert [row[:2] + row[-1:] for row in rows if row[:2] == ["int4", "base"]] == [
        ["int4", "base", "worse"],
        ["int4", "base", "-"],
    ]
    assert f"{base.nll.value:.4f}" not in text, "perplexity says it"
    assert f"{int8.kld.value:.6f} ± {int8.kld.stderr:.6f}" in text


def test_settings_come_first(comparison):
    assert as_text(comparison).splitlines()[:3] == [
        "3,000 tokens of text, 30 windows: sliding, context length 128, stride 100.",
        "± takes tokens as independent. [95 % interval] does not:",
        f"500 resamples, {comparison.blocks}, seed 0.",
    ]


def test_markdown_has_one_table_of_runs_and_one_of_pairs(comparison):
    tables = [part.splitlines() for part in as_markdown(comparison).split("\n\n") if part.startswith("|")]
    assert [len(table) for table in tables] == [2 + 3, 2 + 3]
    for table in tables:
        assert len({line.count(" | ") for line in table}) == 1
    header = [cell.strip() for cell in tables[0][0].strip("| ").split(" | ")]
    assert header == [
        *("run", "weights", "GB", "bits per weight", "bits per byte", "perplexity", "over that of base"),
        *("mean KLD, nats", "same top p, %", "times the floor"),
    ]


def test_labels_do_not_break_markdown(tmp_path):
    path = write_perplexity_run(tmp_path / "run.json", made_up_nlls(1))
    markdown = as_markdown(compare([load_run(path, "a|b\n<i>_c_")], num_resamples=100))
    assert r"| a\|b \<i>\_c\_ |" in markdown


def test_csv_has_every_figure_in_full(comparison):
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    found = {(row["run"], row["beside"], row["figure"]): row for row in rows}
    assert len(found) == len(rows)
    row = found["int4", "", "perplexity"]
    perplexity = comparison.runs[2].perplexity
    assert [float(row[name]) for name in ("value", "stderr", "low", "high")] == [
        *(perplexity.value, perplexity.stderr, perplexity.low, perplexity.high)
    ]
    assert (row["quantization"], row["dtype"], row["verdict"]) == ("awq", "float32", "")
    assert found["int4", "", "weight_bytes"]["value"] == "1500000000"
    assert ("base", "", "kld") not in found
    pair = found["int4", "base", "ppl_ratio"]
    assert (float(pair["value"]), pair["verdict"]) == (comparison.pairs[1].ppl_ratio.value, "worse")
    assert float(found["int4", "int8", "kld_difference"]["low"]) == comparison.pairs[2].kld_difference.low
    for figures in comparison.runs:
        assert float(found[figures.run.label, "", "bits_per_byte"]["value"]) == figures.bits_per_byte.value


def test_the_summary_in_words(comparison):
    ratio = next(pair.ppl_ratio for pair in comparison.pairs if pair.second.label == "int4")
    multiple = comparison.runs[2].kld_over_noise_floor
    assert summary(comparison) == [
        "By perplexity, base and int8 are better than int4.",
        "By perplexity, no difference is shown between base and int8.",
        f"Perplexity over that of base: int4 {ratio.value:.4f} times [{ratio.low:.4f}, {ratio.high:.4f}].",
        "By mean KL divergence, int8 is better than int4.",
        "int8 is at or below the noise floor: the reference's own model diverges as much from itself in other batches.",
        f"Beside the noise floor, the mean KL divergence is more: that of int4 {multiple:,.1f} times it.",
    ]


def test_without_a_difference_there_is_no_ranking(tmp_path):
    paths = [write_perplexity_run(tmp_path / f"{n}.json", made_up_nlls(n)) for n in range(3)]
    found = compare([load_run(path, path.stem) for path in paths])
    assert summary(found) == ["By perplexity, no difference is shown between any two runs."]


def test_a_text_too_short_for_intervals(tmp_path):
    paths = [write_perplexity_run(tmp_path / f"{n}.json", made_up_nlls(n, [64]), window_sizes=[64]) for n in range(2)]
    found = compare([load_run(path, path.stem) for path in paths])
    assert summary(found)[-1] == (
        "Where there is no interval, for the text is short or a value infinite, no difference can be shown."
    )
    assert "too short" in as_text(found)
    assert "[" not in as_text(found).replace("[95 % interval]", "")


def test_an_infinite_perplexity_is_shown_as_such(tmp_path):
    nlls = made_up_nlls(1)
    nlls[0] = math.inf
    path = write_kld_run(tmp_path / "run.json", nlls, np.ones(3000))
    assert "inf" in as_text(compare([load_run(path)], num_resamples=100))
