"""Tests have nothing but the repository: it is all that a clone has."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.neighbours import Neighbours

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_reading_a_file_next_to_the_repository_fails(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text.txt").write_text("text")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "pytest.ini").write_text("[pytest]")
    (repository / "test_reading.py").write_text(
        "from pathlib import Path\n"
        "def test_outside(): Path('../other/text.txt').read_text()\n"
        "def test_inside(): Path('pytest.ini').read_text()\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.neighbours", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert "2 passed, 1 error" in done.stdout
    assert f"a clone elsewhere does not have ['{tmp_path}/other/text.txt']" in done.stdout


def test_caches_next_to_the_repository_are_not_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("other", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache" / "inductor"))
    monkeypatch.setenv("OLDPWD", str(tmp_path / "other"))
    assert Neighbours(tmp_path / "repository").folders == (f"{tmp_path}/other/",)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Neighbours(tmp_path / "repository").folders == ()
    assert Neighbours(Path("/repository")).folders == ()


def test_no_test_names_a_folder_next_to_the_repository():
    # Written so that this file does not name one itself.
    outside = re.compile(r"\.\./share[d]|share[d]\W+data")
    assert [path for path in (ROOT / "tests").rglob("*.py") if outside.search(path.read_text())] == []
