"""CPU time, memory and open files of a server's processes, from Linux's /proc.

A server's processes are those of the session that it leads.
"""

import asyncio
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
API_SERVER = "VLLM::APIServer"
"""vLLM's name for each API server process if there are several."""
SAMPLE_SECONDS = 2.0
MIB = 1024**2


def folders_of(server: int) -> Iterator[Path]:
    """Folders of /proc, one per process of the server; a process may end while its folder is read."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == server:
                yield folder


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds of all API server processes, and of all other processes: engine and workers."""

    api: float = 0.0
    engine: float = 0.0

    def __sub__(self, earlier: "CpuSeconds") -> "CpuSeconds":
        return CpuSeconds(self.api - earlier.api, self.engine - earlier.engine)


def cpu_seconds(server: int) -> CpuSeconds:
    """The CPU seconds that a server has used so far."""
    api = engine = 0.0
    for folder in folders_of(server):
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name is in parentheses and may contain any character.
            head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
            seconds = sum(map(int, tail.split()[11:13])) / TICKS_PER_SECOND
            if int(folder.name) == server or head.endswith(f"({API_SERVER}"):
                api += seconds
            else:
                engine += seconds
    return CpuSeconds(api, engine)


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one process."""

    name: str
    num_bytes: int
    """Its share of memory that is not of files, swapped out or not."""
    open_files: int


def usage(server: int) -> dict[int, Usage]:
    """Process id -> usage."""
    found = {}
    for folder in folders_of(server):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[int(folder.name)] = Usage(
                (folder / "comm").read_text().strip(),
                own_bytes((folder / "smaps_rollup").read_text()),
                len(list((folder / "fd").iterdir())),
            )
    return found


def own_bytes(smaps_rollup: str) -> int:
    """The proportional set size of everything but files, from /proc/PID/smaps_rollup."""
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB$", smaps_rollup, re.MULTILINE)}
    return 1024 * sum(kilobytes[name] for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))


def growths(samples: Sequence[Mapping[int, Usage]]) -> list[tuple[str, float, float]]:
    """The name of every process that is in all samples, and the means in MiB of their first and last tenth."""
    tenth = max(1, len(samples) // 10)
    lasting = set.intersection(*map(set, samples))
    return [
        (
            f"{samples[0][pid].name} ({pid})",
            *(fmean(sample[pid].num_bytes for sample in some) / MIB for some in (samples[:tenth], samples[-tenth:])),
        )
        for pid in sorted(lasting)
    ]


def left_over(before: Mapping[int, Usage], after: Mapping[int, Usage], clients: int) -> Iterator[str]:
    """Processes that are new or gone, and those that kept an open file for every client."""
    for pid in sorted(before.keys() ^ after.keys()):
        yield f"{'a process is gone' if pid in before else 'a process is new'}: {(before | after)[pid].name} ({pid})"
    for pid in sorted(before.keys() & after.keys()):
        if (more := after[pid].open_files - before[pid].open_files) >= clients:
            yield f"{after[pid].name} ({pid}) has {more} more open files"


async def sample_usage(server: int, samples: list[dict[int, Usage]]) -> None:
    """Add the server's usage to a list every `SAMPLE_SECONDS`, until it is canceled."""
    while True:
        samples.append(await asyncio.to_thread(usage, server))
        await asyncio.sleep(SAMPLE_SECONDS)
