"""Presets: the texts and windows of the tools whose figures are published, and what tables say of them."""

import importlib.util
import json
import random
import shlex
from pathlib import Path

import pytest
from fake_server import FakeServer, serve

from scoremode.cli.main import main
from scoremode.comparison import load_run
from scoremode.runs import load_corpus, presets
from scoremode.windows import WindowError, cut_windows
from tests.texts import WIKITEXT

ROWS = ["", " = One = \n", "", " a ( b ) , c \n", " = = Part = = \n", " d \n", "", " = Two = \n", " e \n", ""]
PAGES = [" = One = \n \n a ( b ) , c \n = = Part = = \n d \n ", " = Two = \n e \n \n"]
RAW = " \n" + "\n".join(PAGES)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def lm_eval_task():
    """The functions of lm-eval's task, without the rest of lm-eval."""
    [folder] = importlib.util.find_spec("lm_eval").submodule_search_locations
    spec = importlib.util.spec_from_file_location("task", Path(folder, "tasks/wikitext/preprocess_wikitext.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_are_joined_as_each_tool_joins_them(rows, lm_eval_task):
    for preset in ("exl3", "gptq", "hf"):
        assert load_corpus(str(rows), preset=preset).prompt == {"prompt": "\n\n".join(ROWS)}
    raw, pages = rows.with_name("wiki.test.raw"), rows.with_name("pages.jsonl")
    raw.write_text(RAW)
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    documents = {
        "llama.cpp": (RAW[:-1],),
        "lm-eval": tuple(lm_eval_task.wikitext_detokenizer({"page": page}) for page in PAGES),
    }
    for preset, expected in documents.items():
        for corpus in (load_corpus(str(rows), preset=preset), load_corpus(text_file=raw, preset=preset)):
            assert (corpus.text, corpus.documents) == (RAW, expected)
        assert load_corpus(str(pages), column="page", preset=preset).text == RAW.removeprefix(" \n")
        assert load_corpus(text="without an end", preset=preset).documents == ("without an end",)


def test_pages_are_detokenized_as_by_lm_eval(lm_eval_task):
    choose = random.Random(0)
    marks = [*" '/@-,.:;!?()[]{}\"=°N\ns1a", " @-@ ", " 's", "= = "]
    for text in [WIKITEXT.read_text(), *("".join(choose.choices(marks, k=60)) for _ in range(3000))]:
        assert presets.detokenized(text) == lm_eval_task.wikitext_detokenizer({"page": text})


def test_a_reference_keeps_the_corpus_and_tables_name_it(rows, tmp_path, capsys):
    server = FakeServer()
    with serve(server) as url:
        text = f"--dataset {rows} --preset exl3 --context-length 16"
        for command in (f"record {text}", f"kld --output {tmp_path}/run.json"):
            assert main(shlex.split(f"{command} --reference base --url {url} --quiet")) == 0
    request = server.references["base"].request
    assert (request["method"], request["stride"], request["add_special_tokens"]) == ("disjoint", 16, False)
    assert len(cut_windows(request["max_tokens"], "disjoint", 16)) == 100
    for printed in capsys.readouterr().out.split("model (Q)"):
        assert "comparable with ExLlamaV3's eval/ppl.py -l 16" in printed
    assert load_run(tmp_path / "run.json").corpus == load_corpus(str(rows), preset="exl3").info


@pytest.mark.parametrize("preset", ["llama.cpp", "exl3", "gptq", "hf"])
def test_the_first_windows_of_a_preset_are_those_that_all_have(preset):
    """And no figure is comparable with them."""
    whole, some = (presets.window_settings(preset, 16, number) for number in (None, 3))
    windows, first = (
        cut_windows(each["max_tokens"] or 500, each["method"], 16, each["stride"]) for each in (whole, some)
    )
    assert (len(first), first) == (3, windows[:3])
    words = presets.comparable_with(load_corpus(text="a text", preset=preset, max_windows=3).info, 16)
    assert words.startswith("first 3 windows of ")
    assert words.endswith(": not comparable with published figures")
    for whole_documents in ("lm-eval", "categories"):
        with pytest.raises(WindowError, match=f"the preset {whole_documents}, which measures whole documents"):
            presets.window_settings(whole_documents, None, 3)
