"""The finished windows of a run in a file that outlives the run, should it be killed.

The file is JSON lines: a header with everything that decides the windows and their numbers, then each window when it is
finished, in any order. A line is handed to the operating system before anything else is done, so a process that is
killed leaves at most one torn line, the last.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ConfigDict, NonNegativeFloat, TypeAdapter
from pydantic_core import from_json
from typing_extensions import Buffer

from scoremode._texts import json_object
from scoremode.client import AsyncScoreClient
from scoremode.errors import OutputError, ResponseError, file_errors
from scoremode.results import GeneratedAnswer, KldWindowValues, ResumedKld
from scoremode.runs.plan import WindowNlls, conflicts

_log = logging.getLogger(__name__)

# The first fields of a header: what tells a journal from any other file.
_KIND: dict[str, object] = {"object": "ppl-client.journal", "format": 2}
_BEGINNING = json.dumps(_KIND).removesuffix("}").encode()

_SECONDS = TypeAdapter(NonNegativeFloat, config=ConfigDict(strict=True, allow_inf_nan=False))


Result = TypeVar("Result", bound=WindowNlls | KldWindowValues | ResumedKld | GeneratedAnswer)


class Measurement(Protocol[Result]):
    """Measures the windows of a run, and says how its journal has them."""

    @property
    def num_windows(self) -> int: ...

    async def measure(self, client: AsyncScoreClient, index: int) -> Result:
        """Have a server score a window."""

    def nats(self, window: Result) -> float:
        """The value that a window adds to the sum whose mean is `Progress.mean`."""

    def header(self) -> dict[str, object]:
        """Everything that decides the windows and their numbers; flat, so that each difference has a name."""

    def from_line(self, line: dict[str, object]) -> Result:
        """The window that a line has; a ValueError or ResponseError if it is not of this run, whatever its index."""


class AppendedFile:
    """A locked file that is only appended to, of what a run has finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_done = 0
        """What the file has, in windows or rows."""
        self._file = open_locked(path)
        self._failure: OutputError | None = None

    def close(self) -> None:
        """Close the file. One without anything to resume from is deleted."""
        if not self.num_done:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _append(self, record: Buffer) -> None:
        """Nothing is written after a failure, so that a torn record stays the last."""
        if self._failure is not None:
            raise self._failure
        rest = memoryview(record)
        try:
            while rest:
                # An unbuffered write stops when the disk is full.
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = OutputError(f"cannot write {self.path}: {error.strerror}")
            raise self._failure from error


class Journal(AppendedFile, Generic[Result]):
    """The journal of a run: the windows of its earlier sessions, and a place for those of this one.

    OutputError if the file is of another run, damaged or in use.
    """

    def __init__(self, path: Path, plan: Measurement[Result]) -> None:
        super().__init__(path)
        self.windows: dict[int, Result] = {}
        """The windows of earlier sessions, by their indices."""
        self.seconds = 0.0
        """Scoring time of the earlier sessions."""
        self.plan = plan
        try:
            header = _read_header(path)
            if header is None:
                self._file.truncate(0)
                self._append_line(_header(plan))
            else:
                check_same_run(path, header, _header(plan), "delete it to start afresh")
                self._resume()
        except BaseException:
            self._file.close()
            raise

    def add(self, window: Result, seconds: float) -> None:
        self._append_line({**window.to_line(), "seconds": seconds})
        self.num_done += 1

    def _resume(self) -> None:
        """Read the windows that the file has, and cut off a torn line."""
        size = 0
        for number, line in enumerate(_whole_lines(self.path), start=1):
            if number > 1:
                self._read_window(number, line)
            size += len(line)
        self._file.truncate(size)
        self.num_done = len(self.windows)

    def _read_window(self, number: int, text: bytes) -> None:
        try:
            # Not by `json`, which reads text that UTF-8 cannot hold.
            line = from_json(text)
            seconds = _SECONDS.validate_python(line.pop("seconds", None))
            window = self.plan.from_line(line)
            if window.index in self.windows or window.index >= self.plan.num_windows:
                raise ValueError("a window twice, or none of this run")
        except (ValueError, TypeError, AttributeError, RecursionError, ResponseError) as error:
            raise OutputError(f"{self.path} is damaged at line {number}; delete it to start afresh") from error
        self.windows[window.index] = window
        self.seconds = max(self.seconds, seconds)

    def _append_line(self, record: dict[str, object]) -> None:
        self._append(json.dumps(record, allow_nan=False).encode() + b"\n")


def check_same_run(path: Path, header: Mapping[str, object], wanted: Mapping[str, object], other_way: str) -> None:
    """Refuse a file of finished work whose header is that of another run."""
    if differing := conflicts(path, header, wanted):
        raise OutputError(f"{path} is of another run: {differing}; give the options of that run, or {other_way}")


def count_windows(path: Path) -> tuple[int, int]:
    """The windows that a locked journal has, and those of its whole run; both 0 if it was killed at its header."""
    header = _read_header(path)
    return (0, 0) if header is None else (sum(1 for _ in _whole_lines(path)) - 1, header["num_windows"])


def _header(plan: Measurement[Any]) -> dict[str, object]:
    return {**_KIND, **plan.header(), "num_windows": plan.num_windows}


def _read_header(path: Path) -> dict[str, Any] | None:
    """The header, or None where a process was killed before it was whole."""
    with path.open("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n") and _BEGINNING.startswith(line[: len(_BEGINNING)]):
        return None
    header = json_object(line)
    if header is None or not _KIND.items() <= header.items() or "num_windows" not in header:
        raise OutputError(f"{path} is not a journal of this version of ppl-client; move it away")
    return header


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def open_locked(path: Path) -> FileIO:
    """Open a file for appending, without a buffer, and lock it against every other `ppl-client` until it is closed.

    Delete such a file before it is closed.
    """
    while True:
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file")
        with file_errors(OutputError, f"write {path}"):
            file = FileIO(path, "a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OutputError(f"{path} is in use: another ppl-client is at work on the same output") from error
        except OSError as error:
            _log.debug("%s cannot be locked, as on some network file systems: %s", path, error)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        # Its owner deleted it after it was opened and before it was locked.
        file.close()
