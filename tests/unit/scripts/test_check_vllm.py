"""Comparing versions of vLLM by their wheels, on wheels that are made up here."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import check_vllm

ENGINE = """\
import time

LIMIT = 3

class Engine:
    size: int = 1

    @staticmethod
    def run(x):
        return x + 1
"""

PRIVATE = {"vllm.engine:Engine.run": "wrapped", "vllm.engine:LIMIT": "replaced"}
SERVER = {
    "a.py": "from vllm.api import Request as R\nfrom vllm import engine as e\nprint(e.Engine.size, e.LIMIT)\n",
    "deep/b.py": "def f():\n    from vllm import Model\n    import vllm\n    from numpy import array\n",
}
FILES = {
    "vllm/__init__.py": "from .model import Model\n",
    "vllm/api.py": "class Request:\n    text: str\n",
    "vllm/engine.py": ENGINE,
    "vllm/model.py": "class Model:\n    pass\n",
}
NAMES = ["vllm.api:Request", "vllm.engine:Engine", "vllm.engine:Engine.run", "vllm.engine:LIMIT", "vllm:Model"]


def make_wheel(folder: Path, version: str, **files: str | None) -> None:
    """A wheel of `FILES`, but for those that are given, by their module's name; None leaves one out."""
    changed = {f"vllm/{name}.py": text for name, text in files.items()}
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"vllm-{version}-cp38-abi3-any.whl", "w") as archive:
        for name, text in (FILES | changed).items():
            if text is not None:
                archive.writestr(name, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of wheels; 1.0 is in it and recorded, by the script itself."""
    server, hashes = tmp_path / "server", tmp_path / "manifest.json"
    for name, text in SERVER.items():
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_text(text)
    hashes.write_text("{}")
    monkeypatch.setattr(check_vllm, "SERVER", server)
    monkeypatch.setattr(check_vllm, "PRIVATE", PRIVATE)
    monkeypatch.setattr(check_vllm, "HASHES_FILE", hashes)
    monkeypatch.setattr(check_vllm, "recorded_hashes", lambda: json.loads(hashes.read_text()))
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    make_wheel(tmp_path / "vllm-wheels", "1.0")
    assert check_vllm.check("1.0", write=True)
    return tmp_path / "vllm-wheels"


def statuses(output: str) -> dict[str, str]:
    """Name -> status, as printed."""
    words = [line.split()[:2] for line in output.splitlines()]
    return {pair[1]: pair[0] for pair in words if len(pair) == 2 and pair[0] in ("same", "changed", "gone")}


def test_all_that_is_used_is_recorded(wheels: Path):
    assert sorted(check_vllm.recorded_hashes()["1.0"]) == NAMES


def test_a_version_that_is_recorded_and_unchanged_is_clean(wheels: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert check_vllm.check("1.0")
    output = capsys.readouterr().out
    assert statuses(output) == dict.fromkeys(NAMES, "same")
    assert "5 same, 0 changed, 0 gone" in output


def test_a_changed_name_is_shown_with_its_diff(wheels: Path, capsys: pytest.CaptureFixture[str]):
    make_wheel(wheels, "1.1", engine=ENGINE.replace("x + 1", "x + 2"))
    capsys.readouterr()
    assert not check_vllm.check("1.1")
    output = capsys.readouterr().out
    changed = {"vllm.engine:Engine": "changed", "vllm.engine:Engine.run": "changed"}
    assert statuses(output) == dict.fromkeys(NAMES, "same") | changed
    assert "-    return x + 1\n+    return x + 2\n" in output
    assert "vllm.engine:Engine.run  (wrapped)" in output


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("@staticmethod", "@classmethod", "vllm.engine:Engine.run"),
        ("LIMIT = 3", "LIMIT = 4", "vllm.engine:LIMIT"),
        ("size: int = 1", "size: int = 2", "vllm.engine:Engine"),
    ],
)
def test_decorators_constants_and_class_attributes_count(wheels: Path, before: str, after: str, name: str):
    make_wheel(wheels, "1.1", engine=ENGINE.replace(before, after))
    old, new = (check_vllm.wheel_sources(version) for version in ("1.0", "1.1"))
    assert check_vllm.compare(name, old, new).status == "changed"


def test_comments_and_formatting_are_the_same_but_not_what_was_recorded(
    wheels: Path, capsys: pytest.CaptureFixture[str]
):
    make_wheel(wheels, "1.1", engine=ENGINE.replace("return x + 1", "# One more.\n        return (x+1)"))
    capsys.readouterr()
    assert not check_vllm.check("1.1")
    assert statuses(capsys.readouterr().out) == dict.fromkeys(NAMES, "same")
    assert check_vllm.check("1.1", write=True)
    hashes = check_vllm.recorded_hashes()
    assert list(hashes) == ["1.0", "1.1"]
    assert hashes["1.0"]["vllm.engine:Engine.run"] != hashes["1.1"]["vllm.engine:Engine.run"]


def test_gone_names_and_modules(wheels: Path, capsys: pytest.CaptureFixture[str]):
    make_wheel(wheels, "1.1", engine=ENGINE.replace("LIMIT", "BOUND"), api=None)
    capsys.readouterr()
    assert not check_vllm.check("1.1")
    gone = {"vllm.engine:LIMIT": "gone", "vllm.api:Request": "gone"}
    assert statuses(capsys.readouterr().out) == dict.fromkeys(NAMES, "same") | gone


def test_a_definition_that_moved_behind_a_re_export_is_the_same(wheels: Path, capsys: pytest.CaptureFixture[str]):
    moved = {"engine": "from vllm.inner import *\nfrom vllm.inner import LIMIT\n", "inner": ENGINE}
    make_wheel(wheels, "1.1", **moved)
    capsys.readouterr()
    check_vllm.check("1.1")
    assert statuses(capsys.readouterr().out) == dict.fromkeys(NAMES, "same")


def test_a_recorded_version_whose_wheel_is_another_is_not_clean(wheels: Path, capsys: pytest.CaptureFixture[str]):
    make_wheel(wheels, "1.0", engine=ENGINE.replace("LIMIT = 3", "LIMIT = 4"))
    capsys.readouterr()
    assert not check_vllm.check("1.0")
    assert capsys.readouterr().out.endswith("5 names, 1 differ\n  vllm.engine:LIMIT\n")


def test_an_older_version_is_clean_by_its_own_manifest(wheels: Path, capsys: pytest.CaptureFixture[str]):
    make_wheel(wheels, "0.9", engine=ENGINE.replace("LIMIT = 3", ""))
    assert check_vllm.check("0.9", write=True)
    capsys.readouterr()
    assert check_vllm.check("0.9")
    assert statuses(capsys.readouterr().out)["vllm.engine:LIMIT"] == "gone"


def test_a_wheel_that_is_not_there_is_downloaded(wheels: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(command: list[str], check: bool) -> None:
        asked.append(command)
        make_wheel(wheels, "2.0")

    monkeypatch.setattr(subprocess, "run", download)
    assert check_vllm.wheel("2.0") == wheels / "vllm-2.0-cp38-abi3-any.whl"
    check_vllm.wheel("2.0")
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "vllm==2.0"


@pytest.mark.parametrize(("version", "status"), [("1.0", 0), ("1.1", 1)])
def test_exit_status(wheels: Path, monkeypatch: pytest.MonkeyPatch, version: str, status: int):
    make_wheel(wheels, "1.1", api=None)
    monkeypatch.setattr(sys, "argv", ["check_vllm.py", version])
    assert check_vllm.main() == status
