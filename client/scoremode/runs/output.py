"""The file that a run writes its result to, and the journal next to it while the run lasts."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import copymode
from tempfile import TemporaryFile
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors.numpy import save

from scoremode.errors import OutputError, RunError, file_errors
from scoremode.runs.journal import Journal, Measurement, Result, count_windows, open_locked
from scoremode.runs.report import Arrays

_log = logging.getLogger(__name__)

JOURNAL_SUFFIX = ".journal"
ARRAYS_SUFFIX = ".safetensors"


class _AnyRun(BaseModel):
    kind: str | None = None


def run_kind(path: Path) -> str | None:
    """The kind of a finished run; None where its JSON has none. RunError if the file cannot be read, or has a run's
    arrays."""
    if path.suffix == ARRAYS_SUFFIX:
        raise RunError(f"{path} has the values of a run's tokens: give the run itself, {path.with_suffix('.json')}")
    with file_errors(RunError, f"read {path}"):
        content = path.read_bytes()
    try:
        return _AnyRun.model_validate_json(content).kind
    except ValidationError:
        return None


class Output:
    """A result's file, which appears whole or not at all: until then an earlier file of the name stays as it is.

    The arrays of a result are in a second file next to it, `run.safetensors` for `run.json`.

    Raises:
        OutputError: no file can be written there, there is the journal of an unfinished run and `resume` is false, or
            there is an earlier file, `force` is false and no run that was to replace it is resumed.
    """

    def __init__(self, path: Path, *, resume: bool, force: bool = False) -> None:
        self.path = Path(os.path.realpath(path))
        self._journal_path = self.path.with_name(self.path.name + JOURNAL_SUFFIX)
        self._arrays_path = self.path.with_suffix(ARRAYS_SUFFIX)
        self._journal: Journal[Any] | None = None
        self._check_writable()
        has_journal = self._journal_path.exists()
        if has_journal and not resume:
            self._clear_journal()
        for each in () if force or (has_journal and resume) else (self.path, self._arrays_path):
            # A script may have made an empty file, to have a name of its own.
            if each.exists() and each.stat().st_size:
                raise OutputError(f"{each} is there already: --force replaces it")
        if resume and not has_journal:
            _log.info("there is no %s: starting at the beginning", self._journal_path)

    def start_journal(self, plan: Measurement[Result]) -> Journal[Result]:
        self._journal = journal = Journal(self._journal_path, plan)
        if journal.num_done:
            _log.info("resuming %s: it has %s", self._journal_path, _progress(journal))
        return journal

    def write(self, record: dict[str, object], arrays: Arrays) -> None:
        """Put the result and its arrays in their places.

        The result says which file has its arrays, and the file's checksum, for a process may be killed between the two.
        """
        content = save(arrays)
        described = {"file": self._arrays_path.name, "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps({**record, "arrays": described}, indent=2, allow_nan=False) + "\n"
        write_together({self._arrays_path: content, self.path: text.encode()})

    def remove_journal(self) -> None:
        """Delete the journal of a run whose result is written."""
        if self._journal is not None:
            self._journal.remove()
            self._journal = None

    def abort(self) -> str:
        """Close the journal of a run that failed; returns how to resume it, or nothing where no window was kept."""
        if self._journal is None:
            return ""
        self._journal.close()
        if not self._journal.num_done:
            return ""
        return f"; {self._journal.path} has {_progress(self._journal)}: the same command with --resume resumes it"

    def _check_writable(self) -> None:
        if self.path == self._arrays_path:
            raise OutputError(f"cannot write {self.path}: the values of single tokens go to a file of that name")
        for path in (self.path, self._arrays_path):
            if path.exists() and not path.is_file():
                raise OutputError(f"cannot write {path}: it is not a file")
        with file_errors(OutputError, f"write {self.path}"):
            TemporaryFile(dir=self.path.parent).close()

    def _clear_journal(self) -> None:
        """Delete a journal that nothing hangs on: without a window, or of a run that was killed after its output."""
        with open_locked(self._journal_path):
            num_done, num_windows = count_windows(self._journal_path)
            has_output = self.path.exists() and self.path.stat().st_mtime_ns >= self._journal_path.stat().st_mtime_ns
            if num_done and not (num_done == num_windows and has_output):
                raise OutputError(
                    f"{self._journal_path} has {num_done} of {num_windows} windows of an unfinished run: "
                    "resume it with --resume, or delete it to start afresh"
                )
            self._journal_path.unlink()


def _progress(journal: Journal[Any]) -> str:
    return f"{journal.num_done} of {journal.plan.num_windows} windows"


def write_whole(path: Path, content: bytes) -> None:
    """Put content in the place of a file, whole or not at all; links to it stay links. OutputError if it cannot be
    written."""
    if path.exists() and not path.is_file():
        # Such as /dev/stdout.
        path.write_bytes(content)
    else:
        write_together({path.resolve(): content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files of one folder, whole, before any takes its place, with the mode of the one that was there."""
    temporaries = {path: path.with_name(f".{path.name}.tmp") for path in contents}
    path = next(iter(contents))
    try:
        for path, content in contents.items():
            with temporaries[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                copymode(path, temporaries[path])
        for path, temporary in temporaries.items():
            temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the names of a folder on disk, after a file took its place there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
