"""Comparing versions of vLLM by their wheels, on wheels that are made up here."""

import json
import re
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
    "b.py": "def f():\n    from vllm import Model\n    import vllm\n    from numpy import array\n",
}
FILES = {"__init__": "class Model:\n    pass\n", "api": "class Request:\n    text: str\n", "engine": ENGINE}
NAMES = ["vllm.api:Request", "vllm.engine:Engine", "vllm.engine:Engine.run", "vllm.engine:LIMIT", "vllm:Model"]


def make_wheel(folder: Path, version: str, **files: str | None) -> None:
    """A wheel of `FILES`, except those that are given, by their module's name; None leaves one out."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"vllm-{version}-cp38-abi3-any.whl", "w") as archive:
        for name, text in (FILES | files).items():
            if text is not None:
                archive.writestr(f"vllm/{name}.py", text)


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of wheels; 1.0 is in it and recorded, by the script itself."""
    server, hashes = tmp_path / "server", tmp_path / "manifest.json"
    server.mkdir()
    for name, text in SERVER.items():
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


@pytest.mark.parametrize(
    ("files", "differ"),
    [
        (
            {"engine": ENGINE.replace("x + 1", "x + 2")},
            {"vllm.engine:Engine": "changed", "vllm.engine:Engine.run": "changed"},
        ),
        ({"engine": ENGINE.replace("LIMIT = 3", "LIMIT = 4")}, {"vllm.engine:LIMIT": "changed"}),
        ({"engine": ENGINE.replace("return x + 1", "# One more.\n        return (x+1)")}, {}),
        # A definition that was moved, and is imported where it was.
        ({"engine": "from .inner import *\nfrom vllm.inner import LIMIT\n", "inner": ENGINE}, {}),
        ({"engine": ENGINE.replace("LIMIT", "BOUND")}, {"vllm.engine:LIMIT": "gone"}),
        ({"api": None}, {"vllm.api:Request": "gone"}),
    ],
)
def test_names_of_a_new_version_are_the_same_changed_or_gone(wheels: Path, capsys, files, differ):
    make_wheel(wheels, "1.1", **files)
    capsys.readouterr()
    assert not check_vllm.check("1.1"), "it is not recorded"
    printed = re.findall(r"^(same|changed|gone) +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert {name: status for status, name in printed} == dict.fromkeys(NAMES, "same") | differ
    assert check_vllm.check("1.1", write=True)
    assert check_vllm.check("1.1")


def test_the_exit_status_is_1_where_a_diff_is_shown(wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    make_wheel(wheels, "1.1", engine=ENGINE.replace("x + 1", "x + 2"))
    for version, status in (("1.0", 0), ("1.1", 1)):
        monkeypatch.setattr(sys, "argv", ["check_vllm.py", version])
        assert check_vllm.main() == status
    output = capsys.readouterr().out
    assert "-    return x + 1\n+    return x + 2\n" in output
    assert "vllm.engine:Engine.run  (wrapped)" in output
