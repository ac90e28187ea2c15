"""Presets: the texts and windows of the tools whose figures are published, and what tables say of them."""

import importlib.util
import json
import math
import random
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from fake_server import BOS, FakeServer, error, logprob, serve

from scoremode import presets
from scoremode.cli import main
from scoremode.comparison import load_run
from scoremode.corpora import load_corpus
from scoremode.presets import PRESETS, window_settings
from scoremode.windows import cut_windows
from tests.texts import WIKITEXT

ROWS = ["", " = One = \n", "", " a ( b ) , c \n", " = = Part = = \n", " d \n", "", " = Two = \n", " e \n", ""]
PAGES = [" = One = \n \n a ( b ) , c \n = = Part = = \n d \n ", " = Two = \n e \n \n"]
NUM_WORDS = 23
RAW = " \n" + "\n".join(PAGES)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def lm_eval_task() -> ModuleType:
    """The functions of lm-eval's task, without the rest of lm-eval."""
    [folder] = importlib.util.find_spec("lm_eval").submodule_search_locations
    spec = importlib.util.spec_from_file_location("task", Path(folder, "tasks/wikitext/preprocess_wikitext.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_joined_as_each_tool_joins_them(rows, lm_eval_task):
    texts = {preset: load_corpus(str(rows), preset=preset) for preset in PRESETS}
    for preset in ("exl3", "gptq", "hf"):
        assert texts[preset].prompt == {"prompt": "\n\n".join(ROWS)} == load_corpus(str(rows)).prompt
    assert texts["llama.cpp"].text == texts["lm-eval"].text == RAW
    assert texts["llama.cpp"].documents == (RAW[:-1],), "as it reads a file"
    documents = texts["lm-eval"].documents
    assert documents == tuple(lm_eval_task.wikitext_detokenizer({"page": page}) for page in PAGES)
    words = [lm_eval_task.process_results({"page": page}, [0.0])["word_perplexity"][1] for page in PAGES]
    assert (texts["lm-eval"].num_words, texts["lm-eval"].num_bytes) == (sum(words), sum(map(len, PAGES)))
    assert sum(words) == NUM_WORDS


@pytest.mark.parametrize("preset", ["llama.cpp", "lm-eval"])
def test_files_and_datasets_of_pages_are_what_their_lines_are(rows, preset):
    raw, pages = rows.with_name("wiki.test.raw"), rows.with_name("pages.jsonl")
    raw.write_text(RAW)
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    of_file = load_corpus(text_file=raw, preset=preset)
    assert (of_file.text, of_file.documents) == (RAW, load_corpus(str(rows), preset=preset).documents)
    assert load_corpus(str(pages), column="page", preset=preset).text == RAW.removeprefix(" \n")
    assert load_corpus(text="without an end", preset=preset).documents == ("without an end",)


def test_pages_are_detokenized_as_by_lm_eval(lm_eval_task):
    choose = random.Random(0)
    marks = [*" '/@-,.:;!?()[]{}\"=°N\ns1a", " @-@ ", " 's", "= = "]
    texts = [WIKITEXT.read_text(), *("".join(choose.choices(marks, k=60)) for _ in range(3000))]
    for text in texts:
        assert presets.detokenized(text) == lm_eval_task.wikitext_detokenizer({"page": text})


def test_exl3_takes_a_hundred_rows_of_a_longer_text_without_bos():
    settings = window_settings("exl3", None)
    assert (settings["method"], settings["context_length"], settings["add_special_tokens"]) == ("disjoint", 2048, False)
    assert len(cut_windows(settings["max_tokens"], "disjoint", 2048)) == 100


def ppl_client(command: str, url: str) -> int | str | None:
    try:
        return main([*shlex.split(command), "--url", url, "--quiet"])
    except SystemExit as ended:
        return ended.code


def test_documents_of_lm_eval_share_no_context_and_give_its_word_perplexity(rows, tmp_path, capsys):
    with serve(FakeServer()) as url:
        command = f"--dataset {rows} --preset lm-eval --context-length 16 --output {tmp_path}/run.json"
        assert ppl_client(command, url) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "comparable with word_perplexity of lm-eval's wikitext with max_length=16 on this text" in printed
    nlls = []
    for document in load_corpus(str(rows), preset="lm-eval").documents:
        tokens = list(document.encode())
        for start in range(0, len(tokens), 16):
            end = min(start + 16, len(tokens))
            window = [BOS, *tokens[:16]] if start == 0 else tokens[end - 17 : end]
            nlls += [-logprob(window, position) for position in range(len(window) - (end - start), len(window))]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["nll_sum"] == pytest.approx(sum(nlls))
    assert record["word_perplexity"] == pytest.approx(math.exp(sum(nlls) / NUM_WORDS))
    assert record["bits_per_byte"] == pytest.approx(sum(nlls) / math.log(2) / sum(map(len, PAGES)))
    assert record["corpus"]["preset"] == "lm-eval"


@pytest.mark.parametrize(
    ("preset", "settings", "words"),
    [
        ("llama.cpp", ("llama.cpp", 16, 16), "llama-perplexity -c 16 on this text (not checked against the tool)"),
        ("gptq", ("disjoint", 16, 16), "GPTQ's and AWQ's perplexity with sequences of 16"),
        ("hf", ("sliding", 16, 8), "Hugging Face's perplexity of fixed-length models with max_length=16"),
    ],
)
def test_a_reference_keeps_the_corpus_and_tables_name_it(rows, tmp_path, capsys, preset, settings, words):
    server = FakeServer()
    with serve(server) as url:
        text = f"--dataset {rows} --preset {preset} --context-length 16"
        assert ppl_client(f"record {text} --reference base", url) == 0
        request = server.references["base"].request
        assert tuple(request[name] for name in ("method", "context_length", "stride")) == settings
        assert ppl_client(f"kld --reference base --output {tmp_path}/run.json", url) == 0
    recorded, compared = capsys.readouterr().out.split("model (Q)")
    corpus = f"corpus          rows.jsonl, 10 rows, sha256 {load_corpus(str(rows), preset=preset).fingerprint[:12]}"
    for printed in (recorded, compared):
        assert (corpus in printed, f"comparable with {words}" in printed) == (True, True)
    assert load_run(tmp_path / "run.json").corpus == load_corpus(str(rows), preset=preset).info


def test_a_server_that_knows_no_corpus_records_without(rows, caplog):
    server = FakeServer()

    def old(request):
        has_corpus = b'"corpus"' in request.content
        return error(400, "Extra inputs are not permitted", param="corpus") if has_corpus else server(request)

    with serve(old) as url:
        assert ppl_client(f"record --dataset {rows} --preset hf --context-length 16 --reference base", url) == 0
    assert "is too old to keep where a reference's text is from" in caplog.text
    assert server.references["base"].json()["complete"]


@pytest.mark.parametrize("option", ["--method sliding", "--stride 4", "--max-tokens 9", "--num-samples 3"])
def test_what_a_preset_sets_is_not_given(rows, option, capsys):
    assert ppl_client(f"--dataset {rows} --preset hf {option}", "http://unused") == 2
    assert f"{option.split()[0]} does not work with --preset" in capsys.readouterr().err
