"""How long a sweep may take, told before its first server starts."""

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from scoremode.runs import load_prompts
from scoremode.sweep import SweepPlan, estimate
from scoremode.sweep.estimate import estimated_seconds
from scoremode.sweep.sweep import _Sweep

PLAN = {"output": "o", "text": {"text": "word" * 1000}, "floor": True}
MODELS = [{"name": name, "model": "model"} for name in ("a", "b")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a megabyte, on a machine that multiplies 2e9 numbers a second."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10**6))
    monkeypatch.setattr(estimate, "_cpu_flops", lambda: 2e9)
    monkeypatch.setattr(estimate.shutil, "which", lambda program: None)
    return tmp_path


def seconds(folder: Path, num_starts: int = 2, **changes: object) -> float | None:
    plan = SweepPlan.model_validate({"models": MODELS, **PLAN, **changes})
    prompts = plan.prompts and load_prompts(folder / plan.prompts)
    return estimated_seconds(plan, folder, plan.text.load(folder), prompts, num_starts)


def test_it_follows_from_the_models_size_and_the_texts_length(folder):
    windows = {"method": "disjoint", "context_length": 8}
    # Two starts of a minute; the original three times, its copy once, 1,000 tokens of 1e6 operations at 1e9 a second.
    assert seconds(folder, windows=windows) == pytest.approx(2 * 60 + 4 * 1.0)
    # Servers that start at once are one start.
    assert seconds(folder, 1, windows=windows) == pytest.approx(60 + 4 * 1.0)
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 5)
    # 1,000 more.
    with_answers = seconds(folder, windows=windows, prompts="prompts.jsonl", max_new_tokens=200)
    assert with_answers == pytest.approx(2 * 60 + 4 * 2.0)
    # Windows that overlap by three quarters have four times as many tokens.
    assert seconds(folder, windows={"context_length": 8}) == pytest.approx(2 * 60 + 4 * 4.0)
    assert seconds(folder, windows={"preset": "llama.cpp", "context_length": 8, "max_windows": 5}) == pytest.approx(
        2 * 60 + 4 * 0.041
    )


@pytest.mark.parametrize("changes", [{"lane": "decode"}, {"models": [{"name": "a", "model": "on/hub"}]}])
def test_none_is_told_where_it_is_not_known(folder, changes):
    assert seconds(folder, **changes) is None


def test_the_log_has_it_before_the_first_server_starts_and_corrects_it_afterwards(folder, caplog):
    plan = SweepPlan.model_validate({"models": MODELS, **PLAN})
    sweep = _Sweep(plan, folder, plan.text.load(folder), folder, None, nullcontext)
    with caplog.at_level(logging.INFO):
        sweep._announce(plan.models[0], "loading")
        sweep.seconds.append(600)
        sweep._announce(plan.models[1], "loading")
    assert caplog.messages == [
        "model 1 of 2, a: loading; all may take 2 min, a rough estimate from the model's size",
        "model 2 of 2, b: loading; all may take 10 min more",
    ]
