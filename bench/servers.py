"""Several servers on one GPU, stock and ours, started together and measured one at a time."""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shapes import write_shape

from local_server import ServerProcess, server_process

FLAGS = ("--load-format", "dummy", "--max-model-len", "4096", "--max-num-batched-tokens", "8192")
# Servers that start at the same time would mistake each other's memory for their own, so none of them measures it.
MEMORY = ("--gpu-memory-utilization", "0.22", "--kv-cache-memory-bytes", "8G")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server is started: with which flags, and by which command in which environment if not by ours."""

    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


STOCK = Settings(
    command=(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"),
    environment={"VLLM_PLUGINS": ""},
)


@contextmanager
def started(
    shapes: Sequence[str],
    servers: Mapping[str, Settings],
    tokenizer: Path,
    logs: Path,
    memory: Sequence[str] = MEMORY,
) -> Iterator[dict[tuple[str, str], str]]:
    """(shape, server) -> URL, for every server on every shape; its model is named as its shape.

    `memory` are the flags that give each server its part of the GPU; a server that is alone may measure it itself.
    """
    with started_processes(shapes, servers, tokenizer, logs, memory) as processes:
        yield {key: process.url for key, process in processes.items()}


@contextmanager
def started_processes(
    shapes: Sequence[str],
    servers: Mapping[str, Settings],
    tokenizer: Path,
    logs: Path,
    memory: Sequence[str] = MEMORY,
) -> Iterator[dict[tuple[str, str], ServerProcess]]:
    """As `started`, with the servers' processes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        starting = {}
        for shape in shapes:
            model = write_shape(shape, tokenizer, Path(folder))
            for name, settings in servers.items():
                context = server_process(
                    model,
                    *(*FLAGS, *memory, "--served-model-name", shape, *settings.flags),
                    log=logs / f"{shape}-{name.replace(', ', '-').replace(' ', '-')}.log",
                    environment=dict(settings.environment or {}),
                    command=settings.command,
                )
                starting[shape, name] = pool.submit(stack.enter_context, context)
        yield {key: future.result() for key, future in starting.items()}
