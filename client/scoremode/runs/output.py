"""The file that a run writes its result to, and the journal next to it while the run lasts."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import copymode
from tempfile import TemporaryFile
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from safetensors.numpy import save

from scoremode._texts import first_fault
from scoremode.errors import OutputError, RunError, file_errors
from scoremode.runs.journal import Journal, Measurement, Result, count_windows, open_locked
from scoremode.runs.report import Arrays

_log = logging.getLogger(__name__)
_RunModel = TypeVar("_RunModel", bound=BaseModel)

JOURNAL_SUFFIX = ".journal"
ARRAYS_SUFFIX = ".safetensors"


class _AnyRun(BaseModel):
    kind: str | None = None


def run_kind(path: Path) -> str | None:
    """The kind of a finished run; None if its JSON has none. RunError if the file cannot be read, or has the arrays of
    a run."""
    if path.suffix == ARRAYS_SUFFIX:
        raise RunError(f"{path} has the values of a run's tokens: give the run itself, {path.with_suffix('.json')}")
    with file_errors(RunError, f"read {path}"):
        content = path.read_bytes()
    try:
        return _AnyRun.model_validate_json(content).kind
    except ValidationError:
        return None


def read_run(path: Path, kind: type[_RunModel], command: str) -> _RunModel:
    """Load what a command wrote with `--output`. RunError if the file cannot be read, or is another command's."""
    with file_errors(RunError, f"read {path}"):
        content = path.read_bytes()
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise RunError(f"{path} is not a run of ppl-client {command}: {first_fault(error)}") from None


class Output:
    """A result's file, which is written as a whole. Until then, an earlier file with that name stays unchanged.

    The arrays of a result are in a second file next to it, `run.safetensors` for `run.json`.

    Raises:
        OutputError: the file cannot be written; the journal of an unfinished run exists and `resume` is false; or an
            earlier file exists, `force` is false, and no run with this output is resumed.
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
        for file in () if force or (has_journal and resume) else (self.path, self._arrays_path):
            # An empty file may be replaced: a script may have created it to reserve the name.
            if file.exists() and file.stat().st_size:
                raise OutputError(f"{file} exists; --force replaces it")
        if resume and not has_journal:
            _log.info("%s does not exist: starting at the beginning", self._journal_path)

    def start_journal(self, plan: Measurement[Result]) -> Journal[Result]:
        self._journal = journal = Journal(self._journal_path, plan)
        if journal.num_done:
            _log.info("resuming %s: it has %s", self._journal_path, _progress(journal))
        return journal

    def write(self, record: dict[str, object], arrays: Arrays) -> None:
        """Write the result and its arrays.

        The result has the name and the checksum of the file of arrays, because a process may be killed between
        replacing one and the other.
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
        """Close the journal of a failed run, and return how to resume it; empty if no window was stored."""
        if self._journal is None:
            return ""
        self._journal.close()
        if not self._journal.num_done:
            return ""
        return f"; {self._journal.path} has {_progress(self._journal)}: the same command with --resume resumes it"

    def _check_writable(self) -> None:
        if self.path == self._arrays_path:
            raise OutputError(f"cannot write {self.path}: a run's arrays need this name; choose another suffix")
        for path in (self.path, self._arrays_path):
            if path.exists() and not path.is_file():
                raise OutputError(f"cannot write {path}: it is not a file")
        with file_errors(OutputError, f"write {self.path}"):
            TemporaryFile(dir=self.path.parent).close()

    def _clear_journal(self) -> None:
        """Delete a journal that is not needed: it has no windows, or its run was killed after writing its output."""
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
    """Replace a file's content as a whole; links to it stay links. OutputError if it cannot be written."""
    if path.exists() and not path.is_file():
        # The path is a device such as /dev/stdout.
        path.write_bytes(content)
    else:
        write_together({path.resolve(): content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write several files of one folder completely, then replace the earlier files, whose modes they get."""
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
    """Flush a folder's entries to disk, after a file was created or replaced in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
