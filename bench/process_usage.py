"""Memory and open files of a server's processes, over time."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

SAMPLE_SECONDS = 2.0
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process."""

    name: str
    num_bytes: int
    """Its share of memory that is not of files, swapped out or not."""
    open_files: int


def usage(server: int) -> dict[int, Usage]:
    """Process id -> usage, for every process of the session that a server leads."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end between the listing and the reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.getsid(int(folder.name)) == server:
                found[int(folder.name)] = Usage(
                    (folder / "comm").read_text().strip(),
                    own_bytes((folder / "smaps_rollup").read_text()),
                    len(list((folder / "fd").iterdir())),
                )
    return found


def own_bytes(smaps_rollup: str) -> int:
    """Of /proc/PID/smaps_rollup, the proportional set size of all but files."""
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB$", smaps_rollup, re.MULTILINE)}
    return 1024 * sum(kilobytes[name] for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process's memory, in bytes: means of the first and of the last tenth of the samples."""

    HEADER: ClassVar = ("process", "first tenth, MiB", "last tenth, MiB", "growth")

    name: str
    first: float
    last: float

    @property
    def share(self) -> float:
        return self.last / self.first - 1

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return self.name, f"{self.first / MIB:,.1f}", f"{self.last / MIB:,.1f}", f"{self.share:+.2%}"

    def __str__(self) -> str:
        return f"{self.name} grew from {self.first / MIB:,.1f} to {self.last / MIB:,.1f} MiB, {self.share:+.2%}"


def growths(samples: Sequence[Mapping[int, Usage]]) -> list[Growth]:
    """Of every process that is in all samples."""
    tenth = max(1, len(samples) // 10)

    def mean(pid: int, some: Sequence[Mapping[int, Usage]]) -> float:
        return fmean(sample[pid].num_bytes for sample in some)

    lasting = set.intersection(*map(set, samples))
    return [
        Growth(f"{samples[0][pid].name} ({pid})", mean(pid, samples[:tenth]), mean(pid, samples[-tenth:]))
        for pid in sorted(lasting)
    ]


def left_over(before: Mapping[int, Usage], after: Mapping[int, Usage], clients: int) -> Iterator[str]:
    """Processes and open files of an idle server that were not there before the load; processes that are gone."""
    for pid in sorted(before.keys() ^ after.keys()):
        yield f"{'a process is gone' if pid in before else 'a process is new'}: {(before | after)[pid].name} ({pid})"
    for pid in sorted(before.keys() & after.keys()):
        if (more := after[pid].open_files - before[pid].open_files) >= clients:
            yield f"{after[pid].name} ({pid}) has {more} more open files"


@asynccontextmanager
async def sampled_usage(server: int) -> AsyncIterator[list[dict[int, Usage]]]:
    """A list that gets the server's usage every `SAMPLE_SECONDS`."""
    samples = [usage(server)]

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(await asyncio.to_thread(usage, server))

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()
