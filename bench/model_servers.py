"""Servers on models that have weights, started together: each takes a minute or two, all of them little more.

A server that does not start spoils only its own result. Memory is given to each beforehand, since servers that start at
the same time would mistake each other's for their own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from servers import Settings

from local_server import ServerError, has_gpu, running_server

MEMORY = ("--gpu-memory-utilization", "0.08", "--kv-cache-memory-bytes", "2G")

KERNEL_LINE = re.compile(r"(?:Using|Selected) (\w+) for |Using (\w+) (?:attention )?backend")
LACKING_LINE = re.compile(r"does not have native support|not supported on this|falling back", re.IGNORECASE)
ERROR_LINE = re.compile(r"\w(Error|Exception): \S")
LOG_PREFIX = re.compile(r"^.*?\] ")


@dataclass(frozen=True, slots=True)
class Server:
    """A model folder, and how it is served."""

    model: Path
    settings: Settings


@contextmanager
def starting(servers: Mapping[str, Server], logs: Path, *common: str) -> Iterator[dict[str, Future[str]]]:
    """Name -> URL, as soon as that server is up; `ServerError` is what a future of one that failed raises.

    Logs are `logs/<name>.log`; flags in `common` go to every server. Without a GPU, memory is not divided.
    """
    logs.mkdir(parents=True, exist_ok=True)
    memory = MEMORY if has_gpu() else ()
    # Left in this order: first the pool waits for servers that are still starting, then all are stopped.
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        starts = {}
        for name, server in servers.items():
            context = running_server(
                server.model,
                *(*memory, *common, *server.settings.flags),
                log=log_of(name, logs),
                environment=dict(server.settings.environment or {}),
                command=server.settings.command,
            )
            starts[name] = pool.submit(stack.enter_context, context)
        yield starts


def log_of(name: str, logs: Path) -> Path:
    """Where the server called `name` writes."""
    return logs / f"{name.replace(' ', '-')}.log"


def kernels(log: Path) -> list[str]:
    """The kernels and backends that vLLM says it chose, in its order."""
    matches = KERNEL_LINE.finditer(log.read_text(errors="replace"))
    return list(dict.fromkeys(match[1] or match[2] for match in matches))


def lacking(log: Path) -> list[str]:
    """What vLLM says the device cannot do, a line each."""
    lines = (line for line in log.read_text(errors="replace").splitlines() if LACKING_LINE.search(line))
    return list(dict.fromkeys(LOG_PREFIX.sub("", line) for line in lines))


def failed_row(header: Sequence[str], *beginning: str, error: Exception) -> tuple[str, ...]:
    """A line of a table that says why there are no figures."""
    cells = (*beginning, f"failed: {reason(error)[:100]}")
    return (*cells, *("",) * (len(header) - len(cells)))


def reason(error: BaseException) -> str:
    """An error in one line: for a server, the first in its log's end that names one, which what followed came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ServerError):
        lines = [LOG_PREFIX.sub("", line) for line in lines if ERROR_LINE.search(line)] or lines
    return f"{type(error).__name__}: {(lines or [''])[0]}"
