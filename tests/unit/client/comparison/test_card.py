"""The card: what is published of a comparison, read back from its Markdown and YAML."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from markdown_it import MarkdownIt
from run_files import (
    OWN,
    kld_run,
    made_up_kld,
    made_up_nlls,
    made_up_reference,
    perplexity_run,
    write_kld_run,
    write_perplexity_run,
)

from scoremode.comparison import as_csv, as_text, compare, load_runs
from scoremode.comparison.card import card, write_card
from scoremode.comparison.plots import write_plots
from scoremode.comparison.report import write_report
from scoremode.errors import OutputError, RunError
from scoremode.runs import Corpus, load_corpus
from tests.full_disk import no_file_longer_than

HEADER = [
    *("quant", "GiB", "bits per weight", "PPL ±", "ΔPPL % ±", "mean KLD ±", "median KLD", "99 % KLD", "99.9 % KLD"),
    *("RMS Δp %", "same top %", "tokens/s", "verdict"),
]
SIZE = {"weight_bytes": 3 * 2**29, "num_parameters": 3 * 2**30, "computed_by": {"device": "H200", "num_devices": 2}}


def read(markdown):
    """The cells of the table by rows, and the paragraph after it, as they are shown."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown.split("\n---\n")[1])
    *cells, line = ["".join(part.content for part in each.children) for each in tokens if each.type == "inline"]
    return [cells[start : start + len(HEADER)] for start in range(0, len(cells), len(HEADER))], line


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    folder.mkdir()
    kld = np.random.default_rng(1).exponential(0.01, 3000).astype(np.float32)
    corpus = Corpus("wikitext", "a text", "made up", 1, "wikitext-2-raw-v1", "test", "llama.cpp")
    reference = made_up_reference(
        name="bf16",
        model="/models/base",
        revision="0123456789",
        corpus=corpus.info,
        perplexity=13.0,
        perplexity_stderr=0.2,
        weight_bytes=4 * 2**30,
        num_parameters=2 * 2**30,
    )
    return (
        perplexity_run(folder, "base", made_up_nlls(1), corpus=corpus),
        kld_run(folder, "int4", made_up_nlls(3, shift=0.1), kld, reference=reference, server=SIZE),
        kld_run(folder, "int3", made_up_nlls(4, shift=0.2), 3 * kld, reference=reference, server=SIZE),
    )


def test_every_figure_has_one_error(made):
    base, int4, _ = made
    header, of_base, row, _ = read(card(compare(made, num_resamples=100)))[0]
    assert (header, of_base[:3], of_base[4:-2], of_base[-1]) == (HEADER, ["base", "", ""], [""] * 7, "")
    assert row[-2:] == ["3,000", "worse"]
    assert row[:3] == ["int4", "1.50", "4.00"]
    difference, root = int4.nlls - base.nlls, math.sqrt(3000)
    perplexity, ratio = math.exp(int4.nlls.mean()), math.exp(difference.mean())
    for cell, value, error in (
        (row[3], perplexity, perplexity * int4.nlls.std() / root),
        (row[4], 100 * (ratio - 1), 100 * ratio * difference.std() / root),
        (row[5], int4.kld.mean(), int4.kld.std() / root),
    ):
        found = [float(part) for part in cell.split(" ± ")]
        assert found == [pytest.approx(value, abs=error / 10), pytest.approx(error, rel=0.15)]
    delta_p = np.exp(-int4.nlls) - np.exp(-int4.reference_nlls)
    rest = [
        *np.quantile(int4.kld, [0.5, 0.99, 0.999]),
        100 * math.sqrt((delta_p**2).mean()),
        100 * int4.same_top.mean(),
    ]
    assert [float(cell) for cell in row[6:-2]] == pytest.approx(rest, rel=0.01)


def test_without_a_run_of_the_base_it_is_the_reference(made):
    _, int4, int3 = made
    comparison = compare([int4, int3], num_resamples=100)
    (_, of_base, *rows), line = read(card(comparison))
    perplexity = f"{math.exp(comparison.base.nlls.mean()):.1f} ± {comparison.runs[0].perplexity.stderr:.1f}"
    assert of_base == ["base", "4.00", "16.00", perplexity, *[""] * 9]
    changes = [100 * math.expm1((run.nlls - run.reference_nlls).mean()) for run in (int4, int3)]
    assert [float(row[4].split(" ± ")[0]) for row in rows] == pytest.approx(changes, rel=0.02)
    assert line.startswith("Base base (base@01234567); base: not quantized, float32; int4: ")
    assert line.endswith("; ppl-client compare int4.json int3.json --labels int4,int3 --card")


def test_the_hub_reads_the_yaml_back_whole(made, tmp_path):
    """The second run's figures in both of its lanes, and no other model's."""
    base, int4, int3 = made
    decode = kld_run(tmp_path, "int4-decode", int4.nlls + 0.01, 2 * int4.kld, reference=int4.reference, server=SIZE)
    served = int4.server.model_copy(update={"fingerprint": "of int4"})
    lanes = [replace(int4, server=served), replace(decode, server=served, lane="decode")]
    base = replace(base, model="org/base")
    index = ModelCard(card(compare([base, *lanes, int3], num_resamples=100))).data
    assert (index.model_name, index.base_model, index["base_model_relation"]) == ("int4", "org/base", "quantized")
    klds = [each for each in index.eval_results if each.metric_type == "kl_divergence"]
    for kld, run in zip(klds, lanes, strict=True):
        assert (kld.task_type, kld.dataset_type) == ("text-generation", "Salesforce/wikitext")
        assert kld.dataset_config == "wikitext-2-raw-v1, sliding, context length 128, stride 100"
        assert kld.dataset_split == f"test, 30 windows, {run.lane} lane"
        assert kld.metric_value == pytest.approx(run.kld.mean(), rel=1e-5)
    # huggingface_hub writes again what it read, and loses nothing.
    written = yaml.safe_load(index.to_yaml())["model-index"]
    assert model_index_to_eval_results(written) == ("int4", index.eval_results)
    assert len(index.eval_results) == 12


def test_a_card_is_written_between_its_marks_and_nothing_else_changes(made, tmp_path):
    first, second = compare(made[1:2], num_resamples=100), compare(made[1:], num_resamples=100)
    path = tmp_path / "new.md"
    write_card(first, path)
    assert ModelCard.load(path).data.model_name == "int4"
    one_row = path.read_text()
    write_card(second, path)
    assert ("| int3 |" in path.read_text(), "| int3 |" in one_row) == (True, False)
    write_card(first, path)
    assert path.read_text() == one_row
    path.write_text(other := "---\nlicense: mit # mine\n---\n\n# A model\n")
    write_card(first, path)
    start, end = "<!-- scoremode -->\n", "\n<!-- /scoremode -->\n"
    before, _, rest = path.read_text().partition(start)
    assert (before, rest.endswith(end)) == (f"{other}\n", True)
    path.write_text(f"{before}{start}{end}\nMore of mine.\n")
    write_card(first, path)
    assert path.read_text() == f"{before}{start}{rest}\nMore of mine.\n"
    path.write_text("<!-- scoremode -->\nno end")
    with pytest.raises(RunError, match="has no <!-- /scoremode --> after it"):
        write_card(first, path)


def test_a_full_disk_leaves_every_file_as_it_was(made, tmp_path):
    comparison = compare(made[1:2], num_resamples=100)
    (folder := tmp_path / "of").mkdir()
    card, link, report = folder / "card.md", tmp_path / "card.md", folder / "report.html"
    card.write_text("mine\n")
    card.chmod(0o640)
    link.symlink_to(card)
    report.write_text("an earlier report")
    for write, path in ((write_card, link), (write_report, report)):
        with no_file_longer_than(200), pytest.raises(OutputError, match=f"cannot write .*{path.name}: File too large"):
            write(comparison, path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "card.md": "mine\n",
        "report.html": "an earlier report",
    }
    write_card(comparison, link)
    assert (link.readlink(), card.stat().st_mode & 0o777) == (card, 0o640)


def test_a_report_can_go_to_a_pipe(made, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as readers:
        read = readers.submit(pipe.read_bytes)
        write_report(compare(made[1:2], num_resamples=100), pipe)
        assert read.result().rstrip().endswith(b"</html>")


def test_nothing_published_has_the_path_of_a_folder(tmp_path):
    """Of models, texts, runs or outputs."""
    folder = tmp_path / "a private folder"
    folder.mkdir()
    (folder / "text.txt").write_text("a text")
    corpus = load_corpus(text_file=folder / "text.txt")
    reference = made_up_reference(model=str(folder / "original"), corpus=corpus.info)
    server = {"model": str(folder / "int4")}
    nlls = made_up_nlls(3)
    files = [
        write_kld_run(folder / "int4.json", nlls, made_up_kld(1, 0.1), reference=reference, server=server),
        write_perplexity_run(folder / "int3.json", nlls, corpus=corpus, model=str(folder / "int3"), server=OWN),
    ]
    comparison = compare(load_runs(files), num_resamples=100)
    write_report(comparison, folder / "report.html")
    write_plots(comparison, folder / "plots")
    write_card(comparison, folder / "card.md")
    published = [path.read_bytes() for path in folder.rglob("*") if path.suffix in (".html", ".md", ".svg", ".png")]
    published += [form(comparison).encode() for form in (as_text, as_csv, card)]
    for path in files:
        record = json.loads(path.read_text())
        del record["server"]
        published.append(json.dumps(record).encode())
    assert [content[:80] for content in published if str(folder).encode() in content] == []
    assert [name for name in ("original", "int4", "int3", "text.txt") if name.encode() not in b"".join(published)] == []
