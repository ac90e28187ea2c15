"""Plans of sweeps: what they may contain, and errors that name the file, the entry and the field."""

from pathlib import Path

import pytest

from scoremode.sweep import PlanError, SweepPlan, read_plan

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
LEAST = {"output": "runs", "text": {"text": "Hello"}, "models": [{"name": "a", "model": "m"}]}


def read(tmp_path: Path, text: str) -> SweepPlan:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return read_plan(path)


def test_a_plan_is_read_as_it_is_written(tmp_path: Path):
    plan = read(tmp_path, WHOLE)
    assert plan.serve == ["--enforce-eager", "--max-model-len", "2048"]
    assert plan.env == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    bf16, w4a16 = plan.models
    assert bf16.serve == ["--dtype", "float32", "--served-model-name", "a model"], "split as a shell does"
    assert (w4a16.url, w4a16.model) == ("http://host:8001", None)
    assert (plan.windows.context_length, plan.text.max_tokens, plan.text.split) == (512, 20000, "test")
    assert (plan.compare.html, plan.compare.plots) == ("all.html", None)
    (tmp_path / "here.txt").write_text("a text")
    for source in ("text_file", "dataset"):
        plan = SweepPlan.model_validate({**LEAST, "text": {source: "here.txt"}})
        assert plan.text.load(tmp_path).text == "a text", "relative to the plan"
    assert (plan.command, plan.windows.method, plan.floor) == (["scoremode", "serve"], "sliding", False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("output: runs", "", "output: is required"),
        ("max_tokens: 20000", "max_tokens: many", "text.max_tokens: should be a valid integer"),
        ("dataset: wikitext", "split: test", "text: give one of dataset, text and text_file"),
        ("method: sliding", "method: strided", "windows.method: should be 'sliding'"),
        ("    model: organization/model\n", "", "models[0] (bf16): give a model to serve, or the url"),
        ("name: bf16\n", "nam: bf16\n", "models[0]: name: is required; models[0]: nam: is unknown"),
        ("name: w4a16", "name: BF16", "models: two are called 'bf16'"),
        ("name: w4a16", "name: a/b", "models[1] (a/b): name: is the name of a file as well"),
        ("http://host:8001", "http://host:8001\n    serve: --x", "models[1] (w4a16): command, serve and env are for a"),
        ("--dtype float32", "--port=80", "models[0] (bf16): serve: --port is set by the sweep"),
    ],
)
def test_an_error_names_file_entry_and_field(tmp_path: Path, old: str, new: str, message: str):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, WHOLE.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path / 'plan.yaml'}: {message}")


def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path):
    for text, message in {"a: [": "is not YAML", "- a": "is not a plan", "": "is not a plan"}.items():
        with pytest.raises(PlanError, match=message):
            read(tmp_path, text)
    with pytest.raises(PlanError, match=r"cannot read .*nowhere\.yaml: No such file"):
        read_plan(tmp_path / "nowhere.yaml")
