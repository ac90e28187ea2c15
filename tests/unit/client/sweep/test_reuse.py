"""Plans of sweeps, errors that name the file, the entry and the field, and changes that have a model measured again."""

import json
import os
from pathlib import Path

import pytest
from fake_server import INFO

from scoremode.runs import Corpus
from scoremode.sweep import PlanError, SweepPlan, read_plan
from scoremode.sweep.plan import ModelEntry
from scoremode.sweep.reuse import changes, is_complete, prepare_resume, running_marks, served_marks, text_marks
from scoremode.wire.protocol import ServerInfo

CORPUS = Corpus("fox", "The quick brown fox", "made up", 1)
PLAN = {"output": "runs", "text": {"text": "a"}, "models": [{"name": "int8", "model": "folder"}]}
SERVER = ServerInfo(**{**INFO, "fingerprint": "int8"})
ENTRY = ModelEntry(name="int8", url="http://host")


@pytest.fixture
def folder(tmp_path):
    """Where the plan is, and a model."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def marks_of(folder, corpus=CORPUS, **changed):
    plan = SweepPlan.model_validate({**PLAN, **changed})
    return {**text_marks(plan, corpus), **served_marks(plan, plan.models[0], folder)}


def kept_run(folder, marks):
    run = folder / "int8.json"
    run.write_text(json.dumps({"kind": "kld", "sweep": marks}))
    run.with_suffix(".safetensors").touch()
    return run


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"corpus": Corpus("fox", "The quick brown fix", "made up", 1)}, "text"),
        ({"windows": {"context_length": 4}}, "windows"),
        ({"floor": True}, "floor"),
        ({"serve": ["--enforce-eager"]}, "flags"),
        ({"models": [{"name": "int8", "model": "./folder"}]}, "model"),
        ({"compare": {"html": None}, "start_timeout": 99, "output": "elsewhere"}, ""),
    ],
    ids=str,
)
def test_a_change_that_decides_figures_is_found(folder, changed, found):
    assert changes(kept_run(folder, marks_of(folder)), marks_of(folder, **changed)) == found


def test_a_replaced_file_is_found(folder):
    run, weights = kept_run(folder, marks_of(folder)), folder / "folder" / "model.safetensors"
    later = weights.stat().st_mtime_ns + 10**9
    os.utime(weights, ns=(later, later))
    assert changes(run, marks_of(folder)) == "files"


def test_runs_of_earlier_versions_are_kept(folder):
    """Their marks of the windows, as 713c719 wrote them; a preset has others."""
    windows = marks_of(folder, windows={"method": "disjoint", "context_length": 8})["windows"]
    assert windows == "041675b745e8be19ed6ee00475d5aaa1"
    assert marks_of(folder, windows={"preset": "gptq", "context_length": 8})["windows"] != windows


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        lambda run: run.write_text('{"sweep": null}'),
        lambda run: run.write_text("[" * 100_000),
        lambda run: run.with_suffix(".safetensors").unlink(),
    ],
    ids=["missing", "not of a sweep", "damaged", "without arrays"],
)
def test_a_file_that_is_not_a_run_of_a_sweep_is_not_kept(folder, spoil):
    marks = marks_of(folder)
    spoil(run := kept_run(folder, marks))
    assert changes(run, marks) is None


def test_a_damaged_reference_is_not_complete_and_a_damaged_journal_is_not_resumed(folder):
    run = folder / "int8.json"
    journal = run.with_name("int8.json.journal")
    for path in (folder / "manifest.json", run.with_name("int8.json.begun"), journal):
        path.write_text("[" * 100_000)
    assert (is_complete(folder), prepare_resume(run, marks_of(folder)), journal.exists()) == (False, False, False)


def test_a_running_server_is_known_by_what_decides_its_figures(folder):
    run = kept_run(folder, running_marks(SERVER, ENTRY))
    assert changes(run, running_marks(SERVER.model_copy(update={"max_num_seqs": 4}), ENTRY)) == ""
    others = ({"fingerprint": "int4"}, {"vllm_version": "9.9.9"}, {"dtype": "float16"})
    assert {changes(run, running_marks(SERVER.model_copy(update=other), ENTRY)) for other in others} == {"model"}
    assert changes(run, running_marks(SERVER, ENTRY.model_copy(update={"model": "adapter"}))) == "model"
    without_fingerprint = running_marks(SERVER.model_copy(update={"fingerprint": None}), ENTRY)
    assert changes(kept_run(folder, without_fingerprint), without_fingerprint) == "model", "measured every time"


WHOLE = """
output: runs
text: {dataset: wikitext, max_tokens: 20000}
windows: {method: sliding, context_length: 512, stride: 256}
serve: [--enforce-eager, --max-model-len, 2048]
env: {VLLM_CPU_KVCACHE_SPACE: 1}
floor: true
models:
  - name: bf16
    model: organization/model
    serve: --dtype float32 --served-model-name "a model"
    env: {CUDA_VISIBLE_DEVICES: "0,1"}
  - name: w4a16
    url: http://host:8001
compare: {html: all.html, plots: null}
"""


def read(tmp_path: Path, text: str) -> SweepPlan:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return read_plan(path)


def test_a_plan_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = read(tmp_path, WHOLE)
    assert plan.serve == ["--enforce-eager", "--max-model-len", "2048"]
    bf16, w4a16 = plan.models
    assert bf16.serve == ["--dtype", "float32", "--served-model-name", "a model"], "split as a shell does"
    assert (plan.windows.context_length, plan.text.max_tokens, w4a16.url) == (512, 20000, "http://host:8001")
    # JSON, which is YAML, has two escapes for one character.
    assert read(tmp_path, WHOLE.replace("name: w4a16", r'name: "\ud83d\ude00"')).models[1].name == "\U0001f600"
    (tmp_path / "here.txt").write_text("a text")
    plan = SweepPlan.model_validate({**PLAN, "text": {"dataset": "here.txt"}})
    assert plan.text.load(tmp_path).text == "a text", "relative to the plan"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext").mkdir()
    (tmp_path / "wikitext" / "test.txt").write_text("a folder")
    plan = SweepPlan.model_validate({**PLAN, "text": {"dataset": "./wikitext"}})
    assert plan.text.load(Path()).text == "a folder", "not the alias"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("output: runs", "", "output: Field required"),
        ("    model: organization/model\n", "", "models.0: give a model to serve, or the url"),
        ("name: bf16\n", "nam: bf16\n", "models.0.name: Field required; models.0.nam: Extra inputs are"),
        ("name: w4a16", "name: BF16", "models: two are called 'bf16'"),
        ("http://host:8001", "http://host:8001\n    serve: --x", "models.1: command, serve and env are for a"),
        ("http://host:8001", "host:8001", "models.1.url: not a server address: 'host:8001'"),
        ("method: sliding", "method: conversation", "windows.method: Input should be 'sliding', 'overlapping', "),
        ("method: sliding", "preset: hf", "windows: preset sets stride"),
        ("{method: sliding, context_length: 512, stride: 256}", "{preset: hf}", "windows.preset measures the whole"),
        ("method: sliding", "max_windows: 3", "windows: max_windows needs a preset"),
        ("compare:", "gguf: {files: [a.gguf]}\ncompare:", "gguf needs windows.preset: llama.cpp"),
        (
            "{method: sliding, context_length: 512, stride: 256}",
            "{preset: categories}",
            "text: give one of dataset, text",
        ),
        ("dataset: wikitext, ", "", "text: give one of dataset, text and text_file, or windows.preset: categories"),
        ("dataset: wikitext", "text: a, by: language", "text: messages and by are columns of a dataset"),
        ("stride: 256", "stride: 1024", "windows: stride 1024 is larger than context_length 512"),
        ("--dtype float32", "--port=80", "models.0.serve: --port is set by the sweep"),
        ("name: bf16", r'name: "b\ud800"', r"a value has \ud800, which is not valid Unicode"),
        ("all.html", r'"\ud83d\ude00\ud83d"', r"a value has \ud83d, which is not valid Unicode"),
        ("compare:", f"start_timeout: {10**400}\ncompare:", "start_timeout: Input should be less than or equal to"),
    ],
    ids=lambda value: value[:20],
)
def test_an_error_names_file_entry_and_field(tmp_path: Path, old: str, new: str, message: str):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, WHOLE.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path / 'plan.yaml'}: {message}")


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("output: " + "1" * 5000, ": "),
        ("output: 2026-99-99", ": "),
        ("[" * 100_000, ": "),
        ("output: runs\nmodels: [a,\ntext: }", " at line 3, column 7: expected the node content, but found '}'$"),
    ],
    ids=["digits", "date", "brackets", "brace"],
)
def test_a_file_that_is_not_yaml_is_named(tmp_path: Path, wrong: str, place: str):
    with pytest.raises(PlanError, match=rf"plan\.yaml is not YAML{place}"):
        read(tmp_path, wrong)
