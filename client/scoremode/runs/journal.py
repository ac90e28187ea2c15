"""Stores the finished windows of a run in a file, from which a killed run can resume.

The file has JSON lines: a header with everything that determines the windows and their values, then the windows in the
order in which they finish. Each line is written to the operating system at once, so a killed process leaves at most
one incomplete line, the last.
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
from scoremode.results import GeneratedAnswer, KldWindowValues, ResumedKld, ScoredRollout
from scoremode.runs.plan import WindowNlls, conflicts

_log = logging.getLogger(__name__)

# The first fields of a header, which distinguish a journal from any other file.
_KIND: dict[str, object] = {"object": "ppl-client.journal", "format": 2}
_BEGINNING = json.dumps(_KIND).removesuffix("}").encode()

_SECONDS = TypeAdapter(NonNegativeFloat, config=ConfigDict(strict=True, allow_inf_nan=False))


Result = TypeVar("Result", bound=WindowNlls | KldWindowValues | ResumedKld | GeneratedAnswer | ScoredRollout)


class Measurement(Protocol[Result]):
    """Measures the windows of a run, and defines its journal's header and lines."""

    @property
    def num_windows(self) -> int: ...

    async def measure(self, client: AsyncScoreClient, index: int) -> Result:
        """Have a server score a window."""

    def nats(self, window: Result) -> float:
        """The sum of a window's NLLs or divergences, in nats. `Progress.mean` divides the sum over all windows by the
        number of tokens."""

    def header(self) -> dict[str, object]:
        """Everything that determines the windows and their values. It is not nested, so that
        an error can name each field in which two runs differ."""

    def from_line(self, line: dict[str, object]) -> Result:
        """Parse a window from a line; a ValueError or ResponseError if it cannot be a window of this run."""


class AppendedFile:
    """A locked file to which a run appends its finished windows or rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_done = 0
        """Windows or rows in the file."""
        self._file = open_locked(path)
        self._failure: OutputError | None = None

    def close(self) -> None:
        """Close the file, and delete it if it has no windows or rows."""
        if not self.num_done:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _append(self, record: Buffer) -> None:
        """Append a record. After a failure nothing more is written, so that an incomplete record stays the last."""
        if self._failure is not None:
            raise self._failure
        rest = memoryview(record)
        try:
            while rest:
                # An unbuffered write may write only a part, as when the disk is full.
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failure = OutputError(f"cannot write {self.path}: {error.strerror}")
            raise self._failure from error


class Journal(AppendedFile, Generic[Result]):
    """The journal of a run: reads the windows of earlier sessions, and appends those of this one.

    OutputError if the file belongs to another run, is damaged or in use.
    """

    def __init__(self, path: Path, plan: Measurement[Result]) -> None:
        super().__init__(path)
        self.windows: dict[int, Result] = {}
        """The windows of earlier sessions, by their indices."""
        self.seconds = 0.0
        """Seconds that earlier sessions took."""
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
        """Read the windows in the file, and cut off an incomplete line."""
        size = 0
        for number, line in enumerate(_whole_lines(self.path), start=1):
            if number > 1:
                self._read_window(number, line)
            size += len(line)
        self._file.truncate(size)
        self.num_done = len(self.windows)

    def _read_window(self, number: int, text: bytes) -> None:
        try:
            # `json` would accept escaped lone surrogates, such as `\ud800`, which UTF-8 cannot encode.
            line = from_json(text)
            seconds = _SECONDS.validate_python(line.pop("seconds", None))
            window = self.plan.from_line(line)
            if window.index in self.windows or window.index >= self.plan.num_windows:
                raise ValueError("a window that occurs twice, or is not of this run")
        except (ValueError, TypeError, AttributeError, RecursionError, ResponseError) as error:
            raise OutputError(f"{self.path} is damaged at line {number}; delete it to start afresh") from error
        self.windows[window.index] = window
        self.seconds = max(self.seconds, seconds)

    def _append_line(self, record: dict[str, object]) -> None:
        self._append(json.dumps(record, allow_nan=False).encode() + b"\n")


def check_same_run(path: Path, header: Mapping[str, object], wanted: Mapping[str, object], other_way: str) -> None:
    """Raise OutputError if a file's header belongs to another run; `other_way` completes its message."""
    if differing := conflicts(path, header, wanted):
        raise OutputError(f"{path} belongs to another run: {differing}; use the options of that run, or {other_way}")


def count_windows(path: Path) -> tuple[int, int]:
    """The numbers of windows in a locked journal and in its whole run; both 0 if the header is incomplete."""
    header = _read_header(path)
    return (0, 0) if header is None else (sum(1 for _ in _whole_lines(path)) - 1, header["num_windows"])


def _header(plan: Measurement[Any]) -> dict[str, object]:
    return {**_KIND, **plan.header(), "num_windows": plan.num_windows}


def _read_header(path: Path) -> dict[str, Any] | None:
    """The header; None if the file is new, or a process was killed while it wrote the header."""
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

    To delete the file, do it before you close it, while no other process can have locked it.
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
            raise OutputError(f"{path} is in use: another ppl-client writes the same output") from error
        except OSError as error:
            _log.debug("%s cannot be locked, as is normal on some network file systems: %s", path, error)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        # Another process held the lock and deleted the file meanwhile: open a new one.
        file.close()
