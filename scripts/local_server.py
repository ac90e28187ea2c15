"""A real server on this machine, for the demo, the tests and the benchmarks."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 600
STOP_SECONDS = 60

CPU_FLAGS = ("--dtype", "float32")
"""bfloat16 is emulated, and slow, on a CPU without the instructions for it."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Use every core, and a KV cache of 1 GiB; a server started by hand sets what suits it.

The worker is in the engine's process, as on one GPU: vLLM's CPU platform gives it a process of its own otherwise, which
takes ten seconds to import vLLM, and the engine takes a tenth of two cores while it waits for a step of it.
"""


class ServerError(RuntimeError):
    """The server did not come up; the message ends with its log."""


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True).returncode == 0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is ready for requests, and the process that was started for it."""

    url: str
    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """The process's id, which is that of its group as well."""
        return self.process.pid


@contextmanager
def server_process(
    model: Path | str,
    *flags: str,
    log: Path,
    environment: dict[str, str] | None = None,
    inherited: Mapping[str, str] = os.environ,
    command: Sequence[str] = (),
    start_seconds: float = START_SECONDS,
) -> Iterator[ServerProcess]:
    """`scoremode serve MODEL FLAGS`, ready for requests; stopped on leaving.

    `environment` is added to what it inherits. `command` replaces the command before MODEL, for servers to compare
    with. A server that has not ended `STOP_SECONDS` after it was asked to is killed, and so is one whose starter was.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    gpu = has_gpu()
    arguments = [
        *(command or (sys.executable, "-c", "from scoremode_server.cli import main; main()", "serve")),
        str(model),
        *("--host", "127.0.0.1"),
        *(() if gpu or "--dtype" in flags else CPU_FLAGS),
        *flags,
    ]
    settings = {**inherited, **({} if gpu else CPU_ENVIRONMENT), "VLLM_NO_USAGE_STATS": "1", **(environment or {})}
    with reserved_port() as port:
        arguments += ["--port", str(port)]
        with log.open("w") as output:
            process = subprocess.Popen(
                arguments, env=settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Waits for the end of its input, which comes when this process has died too, then ends the server's group.
        guard = subprocess.Popen(
            ("sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(process.pid)),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_ready(process, url, log, start_seconds)
            yield ServerProcess(url, process)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_SECONDS)
            guard.communicate()
            process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the kernel gives to no other process, though a server may bind it: it takes seconds until one does.
    Until then connections to it are refused.

    Of two sockets with SO_REUSEADDR, as vLLM's has it, both may be bound to a port where neither listens yet.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}\n{log.read_text()[-8000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise ServerError(f"the server was not ready after {seconds:.0f} s\n{log.read_text()[-8000:]}")
