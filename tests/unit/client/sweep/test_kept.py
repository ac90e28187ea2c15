"""Which changes have a sweep measure a model again, and which do not."""

import json
import os

import pytest
from fake_server import INFO

from scoremode.runs.corpora import Corpus
from scoremode.sweep.kept import changes, reference_name, running_marks, served_marks, text_marks
from scoremode.sweep.plan import ModelEntry, SweepPlan
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
        ({"env": {"A": "1"}}, "flags"),
        ({"models": [{"name": "int8", "model": "./folder"}]}, "model"),
        ({"compare": {"html": None}, "start_timeout": 99, "output": "elsewhere"}, ""),
        ({"corpus": Corpus("fox", CORPUS.text, "another place", 2)}, ""),
    ],
    ids=str,
)
def test_a_change_that_decides_figures_is_found(folder, changed, found):
    run = kept_run(folder, marks_of(folder))
    assert changes(run, marks_of(folder, **changed)) == found


def test_a_replaced_or_added_file_is_found(folder):
    run, weights = kept_run(folder, marks_of(folder)), folder / "folder" / "model.safetensors"
    later = weights.stat().st_mtime_ns + 10**9
    os.utime(weights, ns=(later, later))
    assert changes(run, marks_of(folder)) == "files"
    run = kept_run(folder, marks_of(folder))
    (folder / "folder" / "config.json").write_text("{}")
    assert changes(run, marks_of(folder)) == "files"


def test_a_file_that_is_not_a_run_of_a_sweep_is_not_kept(folder):
    marks = marks_of(folder)
    assert changes(folder / "nothing.json", marks) is None
    for content in ("", "[]", '{"kind": "kld"}', '{"sweep": null}'):
        (run := kept_run(folder, marks)).write_text(content)
        assert changes(run, marks) is None
    (run := kept_run(folder, marks)).with_suffix(".safetensors").unlink()
    assert changes(run, marks) is None


def test_a_running_server_is_known_by_what_decides_its_figures(folder):
    run = kept_run(folder, running_marks(SERVER, ENTRY))
    assert changes(run, running_marks(SERVER.model_copy(update={"max_num_seqs": 4}), ENTRY)) == ""
    for changed in ({"fingerprint": "int4"}, {"vllm_version": "9.9.9"}, {"dtype": "float16"}):
        assert changes(run, running_marks(SERVER.model_copy(update=changed), ENTRY)) == "model"
    assert changes(run, running_marks(SERVER, ENTRY.model_copy(update={"model": "adapter"}))) == "model"
    without_fingerprint = running_marks(SERVER.model_copy(update={"fingerprint": None}), ENTRY)
    assert changes(kept_run(folder, without_fingerprint), without_fingerprint) == "model", "measured every time"


def test_a_reference_has_another_name_for_other_content(folder):
    entry = ModelEntry(name="4 bits, g=128", model="folder")
    name = reference_name(entry, marks_of(folder))
    assert name.startswith("sweep-4-bits--g-128-")
    assert reference_name(entry, marks_of(folder, floor=True)) == name
    for changed in ({"windows": {"context_length": 4}}, {"serve": ["--x"]}, {"text": {"text": "a", "max_tokens": 5}}):
        assert reference_name(entry, marks_of(folder, **changed)) != name
