"""The card: what is published of a comparison, read back from its Markdown and YAML."""

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results
from markdown_it import MarkdownIt
from run_files import WINDOW_SIZES, kld_run, made_up_nlls, made_up_reference, perplexity_run

from scoremode.comparison import compare
from scoremode.comparison.card import card
from scoremode.corpora import Corpus

GPU = {"device": "NVIDIA H200", "num_devices": 2}
SIZE = {"weight_bytes": 3 * 2**29, "num_parameters": 3 * 2**30, "quantization": "awq", "computed_by": GPU}


class Reader(HTMLParser):
    """The rows of tables, and the text after them."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.after = ""
        self.feed(MarkdownIt("commonmark").enable("table").render(markdown))

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.get_starttag_text() in ("<code>", "<p>"):
            self.after += data
        elif data.strip():
            self.rows[-1][-1] += data


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    folder.mkdir()
    kld = np.random.default_rng(1).exponential(0.01, sum(WINDOW_SIZES)).astype(np.float32)
    corpus = Corpus("wikitext", "a text", "made up", 1, "wikitext-2-raw-v1", "test", "llama.cpp")
    ppl = {"perplexity": 13.0, "perplexity_stderr": 0.2}
    reference = made_up_reference(corpus=corpus.info, name="bf16", model="org/base", **ppl)
    return (
        perplexity_run(folder, "base", made_up_nlls(1), corpus=corpus),
        kld_run(folder, "int4", made_up_nlls(3, shift=0.1), kld, reference=reference, server=SIZE),
        kld_run(folder, "int3", made_up_nlls(4, shift=0.2), 3 * kld, reference=reference, server=SIZE),
    )


def test_a_markdown_reader_finds_every_figure_with_one_error(made):
    base, int4, _ = made
    read = Reader(card(compare(made, num_resamples=100)))
    assert read.rows[0] == [
        *("quant", "GiB", "bits per weight", "PPL ±", "ΔPPL % ±", "mean KLD ±", "99.9 % KLD", "RMS Δp %", "same top %")
    ]
    assert [row[0] for row in read.rows[1:]] == ["base", "int4", "int3"]
    assert read.rows[1][1:3] + read.rows[1][4:] == [""] * 7, "not known, or not to be"
    row = read.rows[2]
    assert row[1:3] == ["1.50", "4.00"]
    difference = int4.nlls - base.nlls
    ratio, root = math.exp(difference.mean()), math.sqrt(len(difference))
    for cell, value, error in (
        (row[3], math.exp(int4.nlls.mean()), math.exp(int4.nlls.mean()) * int4.nlls.std(ddof=1) / root),
        (row[4], 100 * (ratio - 1), 100 * ratio * difference.std(ddof=1) / root),
        (row[5], int4.kld.mean(), int4.kld.std(ddof=1) / root),
    ):
        found, found_error = map(float, cell.split(" ± "))
        assert (found, found_error) == (pytest.approx(value, abs=error / 10), pytest.approx(error, rel=0.15))
    delta_p = np.exp(-int4.nlls) - np.exp(-int4.reference_nlls)
    assert float(row[6]) == pytest.approx(np.quantile(int4.kld, 0.999), rel=0.01)
    assert float(row[7]) == pytest.approx(100 * math.sqrt((delta_p**2).mean()), abs=0.005)
    assert float(row[8]) == pytest.approx(100 * int4.same_top.mean(), abs=0.005)


def test_one_line_says_where_figures_are_from(made):
    line = card(compare(made[1:], num_resamples=100)).split("\n\n")[1]
    assert "\n" not in line
    sha256 = made[1].corpus.sha256[:12]
    assert Reader(line).after.strip() == (
        f"Base bf16 (org/base); wikitext wikitext-2-raw-v1 test, sha256 {sha256}; sliding, context length 128, "
        "stride 100; 3,000 tokens; "
        "comparable with llama-perplexity -c 128 on this text (not checked against the tool); "
        f"scoremode 9.9.9, vLLM 0.32.0; 2 x NVIDIA H200; {made[1].finished[:10]}; "
        "± one standard error, tokens taken as independent; "
        "ppl-client compare runs/int4.json runs/int3.json --labels int4,int3 --card"
    )


def test_without_a_run_of_the_base_changes_are_from_the_reference(made):
    _, int4, int3 = made
    rows = Reader(card(compare([int4, int3], num_resamples=100))).rows
    assert rows[1] == ["bf16", "", "", "13.00 ± 0.20", *[""] * 5]
    for row, run in zip(rows[2:], (int4, int3), strict=True):
        change = 100 * math.expm1((run.nlls - run.reference_nlls).mean())
        assert float(row[4].split(" ± ")[0]) == pytest.approx(change, rel=0.02)
    own = {**SIZE, "fingerprint": int4.reference.fingerprint}
    itself = kld_run(int4.path.parent, "own", made_up_nlls(0), np.zeros(3000), reference=int4.reference, server=own)
    assert [row[0] for row in Reader(card(compare([itself, int4], num_resamples=100))).rows[1:]] == ["own", "int4"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Llama-3.1-8B-Instruct-GPTQ-W4A16-G128", "Llama-3.1…PTQ-W4A16-G128"),
        ("_" * 40, "____…_______"),
        ("a | b\n`c` <img src=x> " * 4, None),
        ("[x](javascript:1)*y*" * 3, None),
    ],
)
def test_rows_are_short_whatever_the_names_and_figures(tmp_path, name, shown):
    huge = {"weight_bytes": 2**39 - 1, "num_parameters": 2**38}
    nlls, kld = made_up_nlls(1, shift=6), np.random.default_rng(1).exponential(30, 3000)
    runs = [
        perplexity_run(tmp_path, "a", made_up_nlls(2)),
        kld_run(tmp_path, "b", nlls, kld, server=huge),
        kld_run(tmp_path, "c", made_up_nlls(3), 1e-9 * kld, server=huge),
        kld_run(tmp_path, "d", np.where(nlls > 9, np.inf, nlls), np.where(kld > 90, np.inf, kld), server=huge),
    ]
    text = card(compare([*runs[:3], replace(runs[3], label=name)], num_resamples=100))
    assert max(map(len, text.split("\n\n")[0].splitlines())) < 130
    assert "<img" not in MarkdownIt().render(text.split("```")[0])
    rows = Reader(text).rows
    assert {len(row) for row in rows} == {9}
    assert rows[4][3:6] == ["∞", "∞", "∞"]
    assert len(rows[4][0]) <= 24
    assert shown in (None, rows[4][0])


def test_the_hub_reads_the_yaml(made):
    text = card(compare(made, num_resamples=100))
    index = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert [model["name"] for model in index["model-index"]] == ["int4", "int3"]
    [found] = [
        result
        for result in model_index_to_eval_results(index["model-index"][:1])[1]
        if result.metric_type == "kl_divergence"
    ]
    assert (found.task_type, found.dataset_type) == ("text-generation", "Salesforce/wikitext")
    assert (found.dataset_config, found.dataset_split) == ("wikitext-2-raw-v1", "test")
    assert found.metric_value == pytest.approx(made[1].kld.mean(), rel=1e-5)
