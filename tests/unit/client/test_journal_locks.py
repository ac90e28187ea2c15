"""A journal is locked until it is deleted, and a lock on a deleted one is worth nothing."""

import fcntl
import os
from pathlib import Path

import pytest

from scoremode import OutputError
from scoremode.runs.journal import open_locked
from scoremode.runs.output import Output


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "result.json.journal"
    path.touch()
    return path


def test_a_journal_without_windows_is_locked_while_it_is_deleted(path, monkeypatch):
    unlink, tried = Path.unlink, []

    def try_to_take(self, *arguments, **fields):
        with pytest.raises(OutputError, match="in use"):
            open_locked(self)
        tried.append(self)
        unlink(self, *arguments, **fields)

    monkeypatch.setattr(Path, "unlink", try_to_take)
    Output(path.with_suffix(""), resume=False)
    assert (tried, path.exists()) == ([path], False)


def test_a_journal_that_is_deleted_before_it_is_locked_is_opened_anew(path, monkeypatch):
    flock = fcntl.flock

    def lock_after_its_owner_deleted_it(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_its_owner_deleted_it)
    with open_locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
        with pytest.raises(OutputError, match="in use"):
            open_locked(path)
