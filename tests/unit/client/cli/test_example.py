"""The runs that come with the package."""

import shutil
from pathlib import Path

import pytest

from scoremode.cli.example import RUNS
from scoremode.cli.main import main
from scoremode.comparison import load_run


def test_the_runs_are_of_one_original_and_small(tmp_path: Path):
    shutil.unpack_archive(RUNS, tmp_path)
    runs = {path.stem: load_run(path) for path in tmp_path.glob("*.json")}
    original = runs.pop("SmolLM2-135M-Instruct-from-Q4_1")
    assert [run.server.quantization for run in runs.values()] == ["compressed-tensors"] * 2
    for run in runs.values():
        # The reference's values of the text's tokens, recorded, and those of the original's run, scored again.
        assert abs((run.reference_nlls - original.nlls).mean()) < 0.005
    assert RUNS.stat().st_size <= 400 * 1000


def test_the_example_writes_a_report_and_a_card_and_prints_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["example"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:3]] == ["INT8", "W4A16"]
    assert all(line.endswith(" % of the size") for line in lines[1:3])
    folder = tmp_path / "scoremode-example"
    card = (folder / "README.md").read_text()
    assert "\n- Base: SmolLM2-135M-Instruct-from-Q4\\_1\n" in card
    assert "| W4A16 |" in card
    assert "SmolLM2-135M-Instruct-from-Q4_1" in (folder / "report.html").read_text()
    assert main(["example"]) == 1
    assert "scoremode-example exists already: give another folder with --output" in capsys.readouterr().err
