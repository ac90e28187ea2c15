"""`ppl-client quick`: the plan that its options stand for."""

from pathlib import Path

from scoremode.cli import quick
from scoremode.cli.main import main, parse
from scoremode.cli.quick import _answers_folder, plan
from scoremode.sweep import SweepPlan


def plan_of(*words: str) -> SweepPlan:
    return SweepPlan.model_validate(plan(parse(["quick", *words])[1]))


def test_options_are_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = plan_of(
        *("org/original", "./copies/int8", "q4.gguf", "--lane", "both", "--max-windows", "3"),
        *("--write-card", "README.md", "--original-flags=--offload-group-size 1", "--", "--dtype", "float32"),
    )
    assert [(entry.name, entry.model) for entry in read.models] == [
        *[("original", "org/original"), ("int8", "./copies/int8")]
    ]
    assert [entry.serve for entry in read.models] == [["--offload-group-size", "1"], []]
    assert (read.serve, read.lanes, read.floor) == (["--dtype", "float32"], ("prefill", "decode"), True)
    assert (read.windows.preset, read.windows.max_windows, read.text.dataset) == ("llama.cpp", 3, "wikitext")
    assert (read.gguf.files, Path(read.compare.card)) == (["q4.gguf"], tmp_path / "README.md")
    assert Path(read.compare.html) == tmp_path / "scoremode-quick" / "report.html"


def test_folders_of_one_name_are_told_apart():
    assert [entry.name for entry in plan_of("a/model", "b/model").models] == ["a-model", "b-model"]


def test_the_texts_by_category_take_the_place_of_wikitext():
    read = plan_of("a", "b", "--preset", "categories")
    corpus = read.text.load(Path(), read.windows.preset)
    assert (corpus.name, len(corpus.documents), read.window_settings["context_length"]) == ("categories v1", 261, 4096)


def test_a_text_and_prompts_of_your_own(tmp_path):
    (file := tmp_path / "own").touch()
    read = plan_of("a", "b", "--text-file", str(file), "--prompts", str(file), "--max-new-tokens", "7")
    assert (read.text.dataset, read.text.text_file, read.prompts, read.max_new_tokens) == (None, *[str(file)] * 2, 7)


def test_answers_are_in_a_folder_of_the_models_name_or_of_lm_evals(tmp_path):
    for name in ("org__m", "one__n", "other__n", "o", "org__o"):
        (tmp_path / name).mkdir()
    assert [_answers_folder(tmp_path, name).name for name in "mno"] == ["org__m", "n", "o"]


def test_conversations_have_no_preset():
    read = plan_of("a", "b", "--dataset", "chats.jsonl", "--messages", "messages", "--by", "language")
    assert (read.windows.preset, read.text.messages, read.text.by) == (None, "messages", "language")


def test_names_that_may_be_mistakes_are_told_and_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, config in (("int8", '{"quantization_config": {}}'), ("bf16", "{}")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)
    monkeypatch.setattr(quick.sweep, "measure", lambda *_: 0)
    notes = {
        ("int8", "./bf16"): "int8 is quantized and a copy is not: the original comes first",
        ("bf16", "gpt2"): "gpt2 is not a folder here, so servers look for it on the hub",
        ("bf16", "./int8"): "",
        ("int8", "hub/name"): "",
    }
    for order, note in notes.items():
        assert main(["quick", *order]) == 0
        assert capsys.readouterr().err == (note and f"ppl-client: {note}\n")
