"""CPU time of a server's processes, the API server's and the engine's apart, from Linux's /proc."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
API_SERVER = "VLLM::APIServer"
"""What vLLM names each API server process where there are several."""


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/PID/stat: name (15 characters at most), and user and system time of all threads in ticks."""

    pid: int
    name: str
    parent: int
    ticks: int

    @classmethod
    def parse(cls, line: str) -> "Process":
        """Read the line; the name stands in parentheses and may contain any character, parentheses too."""
        head, _, tail = line.rpartition(")")
        pid, _, name = head.partition(" (")
        _, parent, *others = tail.split()
        user, system = others[9:11]
        return cls(int(pid), name, int(parent), int(user) + int(system))


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Of the API server, or all of them, and of every other process below it: engine and workers."""

    api: float
    engine: float

    def __sub__(self, earlier: "CpuSeconds") -> "CpuSeconds":
        return CpuSeconds(self.api - earlier.api, self.engine - earlier.engine)


def cpu_seconds(server: int) -> CpuSeconds:
    """What the server with this process id has used so far."""
    return total(list(_running()), server)


def total(processes: Iterable[Process], server: int) -> CpuSeconds:
    """Sums over the server and its descendants."""
    known = {process.pid: process for process in processes}
    below = [process for process in known.values() if process.pid != server and _descends(process, server, known)]
    api = [known[server], *(process for process in below if process.name == API_SERVER)]
    engine = [process for process in below if process.name != API_SERVER]
    return CpuSeconds(_seconds(api), _seconds(engine))


def _descends(process: Process, ancestor: int, known: dict[int, Process]) -> bool:
    while process.parent in known:
        if process.parent == ancestor:
            return True
        process = known[process.parent]
    return False


def _seconds(processes: Iterable[Process]) -> float:
    return sum(process.ticks for process in processes) / TICKS_PER_SECOND


def _running() -> Iterator[Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end between the listing and the reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            yield Process.parse((folder / "stat").read_text(errors="replace"))
