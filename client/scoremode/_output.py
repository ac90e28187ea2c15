"""The file that a run writes its result to, and the journal beside it while the run lasts."""

import json
import logging
import os
import shutil
from pathlib import Path
from tempfile import TemporaryFile

from scoremode.errors import OutputError
from scoremode.journal import Journal, count_windows, open_journal
from scoremode.plan import Plan

_log = logging.getLogger(__name__)

JOURNAL_SUFFIX = ".journal"

# Upper estimates of what is written for an NLL, a window and the rest.
_JOURNAL_BYTES_PER_NLL = 24
_OUTPUT_BYTES_PER_NLL = 34
_BYTES_PER_WINDOW = 300
_OTHER_BYTES = 16_384


class Output:
    """A result's file, which appears whole or not at all: until then an earlier file of the name stays as it is.

    Raises:
        OutputError: no file can be written there, or there is the journal of an unfinished run and `resume` is false.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self._journal_path = self.path.with_name(self.path.name + JOURNAL_SUFFIX)
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")
        self._journal: Journal | None = None
        self._check_writable()
        if not self._journal_path.exists():
            if resume:
                _log.info("there is no %s: starting at the beginning", self._journal_path)
        elif not resume:
            self._clear_journal()

    def start_journal(self, plan: Plan) -> Journal:
        """Open the run's journal, once there is room for all that is to be written.

        Raises:
            OutputError: there is not, or the journal is of another run, damaged or in use.
        """
        self._journal = open_journal(self._journal_path, plan)
        if self._journal.num_done:
            _log.info("going on with %s: it has %s", self._journal_path, _progress(self._journal))
        self._check_room(plan, self._journal)
        return self._journal

    def write(self, record: dict[str, object]) -> None:
        """Put the result in its place, and delete the journal.

        Raises:
            OutputError: it cannot be written. The journal stays.
        """
        try:
            with self._temporary.open("w", encoding="utf-8") as file:
                json.dump(record, file, indent=2, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            self._temporary.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        finally:
            self._temporary.unlink(missing_ok=True)
        if self._journal is not None:
            self._journal.remove()
            self._journal = None

    def give_up(self) -> str:
        """Close the journal of a run that failed; says how to go on, or nothing where no window was kept."""
        if self._journal is None:
            return ""
        self._journal.close()
        if not self._journal.num_done:
            return ""
        return f"; {self._journal.path} has {_progress(self._journal)}: the same command with --resume goes on"

    def _check_writable(self) -> None:
        if self.path.exists() and not self.path.is_file():
            raise OutputError(f"cannot write {self.path}: it is no file")
        try:
            TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error

    def _clear_journal(self) -> None:
        """Delete a journal that nothing hangs on: without a window, or of a run that was killed after its output."""
        num_done, num_windows = count_windows(self._journal_path)
        if num_done and not (num_done == num_windows and self._is_newer_than_journal()):
            raise OutputError(
                f"{self._journal_path} has {num_done} of {num_windows} windows of an unfinished run: "
                "go on with it by --resume, or delete it to start afresh"
            )
        self._journal_path.unlink()

    def _is_newer_than_journal(self) -> bool:
        return self.path.exists() and self.path.stat().st_mtime_ns >= self._journal_path.stat().st_mtime_ns

    def _check_room(self, plan: Plan, journal: Journal) -> None:
        num_scored = sum(window.num_scored for window in plan.windows)
        num_kept = sum(map(len, journal.windows.values()))
        needed = (
            _JOURNAL_BYTES_PER_NLL * (num_scored - num_kept)
            + _OUTPUT_BYTES_PER_NLL * num_scored
            + 2 * _BYTES_PER_WINDOW * len(plan.windows)
            + _OTHER_BYTES
        )
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise OutputError(
                f"no room in {self.path.parent}: journal and output may take {needed / 1e6:,.1f} MB, "
                f"{free / 1e6:,.1f} MB are free"
            )


def _progress(journal: Journal) -> str:
    return f"{journal.num_done} of {journal.num_windows} windows"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
