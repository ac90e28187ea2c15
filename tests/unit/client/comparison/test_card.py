"""The card: what is published of a comparison, read back from its Markdown and YAML."""

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

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

HEADER = ["quant", "GiB", "ΔPPL % [ ]", "mean KLD ±", "99.9 % KLD", "same top %"]
FULL = [
    *("quant", "GiB", "bits per weight", "PPL ±", "ΔPPL % [ ]", "mean KLD ±", "median KLD", "99 % KLD", "99.9 % KLD"),
    *("RMS Δp %", "same top %"),
]
SIZE = {"weight_bytes": 3 * 2**29, "num_parameters": 3 * 2**30, "computed_by": {"device": "H200", "num_devices": 2}}


def read(markdown):
    """The rows of the table, the paragraphs before it and after it, and the list, as they are shown."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown.partition("\n---\n")[2])
    texts = {"paragraph_open": [], "list_item_open": [], "tr_open": []}
    for token in tokens:
        if token.type in texts and not (token.type == "paragraph_open" and token.hidden):
            kind = token.type
            texts[kind].append([])
        if token.type == "inline":
            texts[kind][-1].append("".join(part.content for part in token.children))
    return texts["tr_open"], [text for [text] in texts["paragraph_open"]], [text for [text] in texts["list_item_open"]]


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


def test_the_card_has_six_columns_and_the_full_one_all_but_the_speed(made):
    base, int4, _ = made
    comparison = compare(made, num_resamples=100)
    (header, of_base, short, _), (sentence, *_), _ = read(card(comparison))
    assert (header, of_base) == (HEADER, ["base", *"-----"])
    full_header, _, row, _ = read(card(comparison, is_full=True))[0]
    assert full_header == FULL
    assert short == [row[FULL.index(heading)] for heading in HEADER]
    assert row[:3] == ["int4", "1.50", "4.00"]
    assert sentence.startswith(
        "Compared with base over 3,000 tokens of wikitext: the size of the weight files, the change"
    )
    difference, root = int4.nlls - base.nlls, math.sqrt(3000)
    perplexity, ratio = math.exp(int4.nlls.mean()), math.exp(difference.mean())
    for cell, value, error in (
        (row[3], perplexity, perplexity * int4.nlls.std() / root),
        (row[5], int4.kld.mean(), int4.kld.std() / root),
    ):
        found = [float(part) for part in cell.split(" ± ")]
        # One digit of the error, of which it leaves half.
        assert found == [pytest.approx(value, abs=0.5 * error), pytest.approx(error, rel=0.5)]
    interval = comparison.runs[1].ppl_ratio
    found = [float(part) for part in row[4].replace("[", "").replace("]", "").replace(",", "").split()]
    assert found == pytest.approx([100 * (end - 1) for end in (ratio, interval.low, interval.high)], abs=0.051)
    delta_p = np.exp(-int4.nlls) - np.exp(-int4.reference_nlls)
    rest = [
        *np.quantile(int4.kld, [0.5, 0.99, 0.999]),
        100 * math.sqrt((delta_p**2).mean()),
        100 * int4.same_top.mean(),
    ]
    assert [float(cell) for cell in row[6:]] == pytest.approx(rest, rel=0.01)


def test_without_a_run_of_the_base_it_is_the_reference(made):
    _, int4, int3 = made
    comparison = compare([int4, int3], num_resamples=100)
    (_, of_base, *rows), _, items = read(card(comparison, is_full=True))
    perplexity = f"{math.exp(comparison.base.nlls.mean()):.0f} ± {comparison.runs[0].perplexity.stderr:.0f}"
    assert of_base == ["base", "4.00", "16.00", perplexity, *"-------"]
    changes = [100 * math.expm1((run.nlls - run.reference_nlls).mean()) for run in (int4, int3)]
    assert [float(row[4].split()[0]) for row in rows] == pytest.approx(changes, abs=0.051)
    assert items[:2] == ["Base: base (base@01234567)", "base: not quantized, float32"]
    assert items[-1] == "ppl-client compare int4.json int3.json --labels int4,int3 --card"
    assert max(map(len, items)) < 120
    details = card(comparison).partition("<details>")
    assert "base@01234567" not in details[0]
    assert details[2].rstrip().endswith("\n\n</details>")


def test_a_picture_next_to_the_card_is_dark_where_pages_are(made, tmp_path):
    comparison = compare(made[1:], num_resamples=100)
    write_card(comparison, path := tmp_path / "my card.md")
    [line] = [line for line in path.read_text().splitlines() if line.startswith("![")]
    name = re.fullmatch(r"!\[Mean KL divergence against weight files \(GiB\)\]\((.*)\)", line)[1]
    assert unquote(name) == "my card-kl-divergence.svg"
    svg = ElementTree.parse(tmp_path / unquote(name))
    style, *_ = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}style")]
    light, dark = (
        dict(re.findall(r"(--[\w-]+):(#\w+)", part)) for part in style.split("@media(prefers-color-scheme:dark)")
    )
    used = re.findall(r"var\((--[\w-]+)\)", ElementTree.tostring(svg.getroot(), encoding="unicode"))
    assert set(used) <= light.keys() == dark.keys()
    assert (light["--plot-paper"], dark["--plot-paper"]) == ("#ffffff", "#14171c")
    # No color is left that would be the same on both.
    assert re.findall("#[0-9a-f]{6}", (tmp_path / unquote(name)).read_text().replace(style, "")) == []
    assert "![" not in card(comparison), "a printed card has no file"
    write_card(compare(made[:1], num_resamples=100), tmp_path / "plain.md")
    assert [each.name for each in tmp_path.glob("plain*")] == ["plain.md"]


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
    path.write_text(other := "# A model\n")
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


OTHERS = """\
model-index:
- name: My-Model
  results:
  - task:
      type: text-generation
    dataset:
      name: IFEval
      type: HuggingFaceH4/ifeval
    metrics:
    - type: inst_level_strict_acc
      value: 0.5
"""
"""As huggingface_hub writes it."""


@pytest.mark.parametrize(
    ("head", "index", "name"),
    [
        ("license: mit # mine\ntags: [a, 'b']\n\n# the end\n", "", "int4"),
        ("base_model: org/other\n", "model-index:\n  - name: x\n    results: []\n# after it\n", "int4"),
        ("license:   mit\n", f"{OTHERS}\n# after it\ntags:\n- gptq\n", "My-Model"),
        ("", "", "int4"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_figures_go_into_front_matter_that_is_there_and_no_other_byte_changes(
    made, tmp_path, head, index, name, newline
):
    comparison, path = compare(made[1:2], num_resamples=100), tmp_path / "README.md"
    body = "\n# A model  \n\n---\nlicense: none\n---\n"
    text = f"---\n{head}{index}---\n{body}".replace("\n", newline)
    path.write_bytes(text.encode())
    write_card(comparison, path)
    written = path.read_bytes().decode()
    data = ModelCard.load(path).data
    results = [each for each in data.eval_results if each.metric_type == "kl_divergence"]
    assert [each.metric_value for each in results] == [pytest.approx(made[1].kld.mean(), rel=1e-5)]
    assert (data.model_name, len(data.eval_results)) == (name, 6 + (name == "My-Model"))
    before = {**yaml.safe_load(head + index or "{}"), "model-index": None}
    assert {**data.to_dict(), "model-index": None} == before
    # All but the key and the block at the end is as it was.
    ours = re.compile(r"model-index:\r?\n(?:(?: |- ).*\n)*")
    kept, had = (ours.sub("", each, count=1) for each in (written, text))
    assert kept.startswith(had)
    assert kept[len(had) :].startswith(f"{newline}<!-- scoremode -->{newline}")
    assert written.count("\n") == written.count(newline)
    write_card(comparison, path)
    assert path.read_bytes().decode() == written
    write_card(compare(made[2:], num_resamples=100), path)
    again = ModelCard.load(path).data
    assert (again.model_name, len(again.eval_results)) == ("int3" if name == "int4" else name, len(data.eval_results))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# A model\n", "has no front matter"),
        ("---\n- a list\n---\n", "not clear"),
        ("---\nlicense: [mit\n---\n", "not clear"),
        ("---\n{license: mit}\n---\n", "not clear"),
        ("---\nmodel-index: {name: x}\n---\n", "not clear"),
        (f"---\n{OTHERS}  more: of mine\n---\n", "not clear"),
        (f"---\n{OTHERS}- name: Another\n  results: []\n---\n", "not clear"),
        (f"---\n{OTHERS}model-index: []\n---\n", "not clear"),
        (f"---\n{OTHERS.replace('0.5', '0.5  # of mine')}---\n", "not clear"),
    ],
)
def test_what_is_not_clear_is_left_and_its_yaml_is_logged(made, tmp_path, text, reason, caplog):
    path = tmp_path / "README.md"
    path.write_text(text)
    write_card(compare(made[1:2], num_resamples=100), path)
    assert path.read_text().startswith(f"{text}\n<!-- scoremode -->\n")
    message = caplog.records[0].getMessage()
    assert reason in message
    pasted = yaml.safe_load(message.partition("\n\n")[2])["model-index"]
    assert model_index_to_eval_results(pasted)[0] == "int4"


def test_a_full_disk_leaves_every_file_as_it_was(made, tmp_path):
    comparison = compare(made[1:2], num_resamples=100)
    (folder := tmp_path / "of").mkdir()
    card, link, report = folder / "card.md", tmp_path / "card.md", folder / "report.html"
    card.write_text("mine\n")
    card.chmod(0o640)
    link.symlink_to(card)
    report.write_text("an earlier report")
    for write, path in ((write_card, link), (write_report, report)):
        with no_file_longer_than(200), pytest.raises(OutputError, match=f"write .*{path.stem}.*: File too large"):
            write(comparison, path)
    assert (card.read_text(), report.read_text()) == ("mine\n", "an earlier report")
    write_card(comparison, link)
    assert (link.readlink(), card.stat().st_mode & 0o777) == (card, 0o640)
    assert card.read_text().startswith("mine\n\n<!-- scoremode -->\n")
    assert (tmp_path / "card-kl-divergence.svg").exists()
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_a_report_can_go_to_a_pipe(made, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as readers:
        read = readers.submit(pipe.read_bytes)
        write_report(compare(made[1:2], num_resamples=100), pipe)
        assert read.result().rstrip().endswith(b"</html>")


def test_nothing_published_has_the_path_of_a_folder(tmp_path):
    """Folders may be those of models, texts, runs or outputs."""
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
