"""Runs the processes of a sweep, each with a log: a model's server, from its start to its end, and llama.cpp's
llama-perplexity on a GGUF file."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import httpx
import numpy as np

from scoremode._tasks import Result
from scoremode.errors import ScoremodeError, ServerError, TransportError
from scoremode.sweep.memory import Device

_log = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""The sweep kills a server that runs this long after it was asked to end. The server's `--shutdown-timeout` is 30."""
_POLL_SECONDS = 0.5
# 1 is PR_SET_PDEATHSIG: the kernel sends SIGTERM when the parent ends. The parent may have ended before this call.
_TIED = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_END_SECONDS = 15.0
"""A server whose engine died ends within this time after its requests fail."""
_SUMMARY = (
    "Engine core initialization failed|EngineCore encountered an issue|Worker failed with error|the engine has died"
)
"""Matches error lines that only say that there is another error."""
# The possessive quantifier keeps the time linear in the length of a line.
_ERROR = re.compile(
    r"(?<![\w.])(?:[\w.]++(?:(?<=Error)|(?<=Exception)|(?<=Exit))|(?:[a-z_]\w*+\.)++[A-Z]\w*+):(?: .+|$)|^scoremode: .+"
)
"""Matches an exception's line: a name that ends as most do, or a name with its modules."""
_NEXT_MESSAGE = re.compile(
    rf".*(?:{_SUMMARY})|Traceback |During handling of |The above exception |"
    r"\(\w+ pid=|\[|\w+: |(?:DEBUG|INFO|WARNING|ERROR)\b|\S+:\d+: "
)
"""Matches lines that do not continue an error's message."""
_INFO = re.compile(r"(?:\(\w+ pid=\d+\) )?INFO\b")
_NO_ERROR = re.compile(r"(?:\(\w+ pid=\d+\) )?(?:INFO|WARNING)\b")
_REASON_LENGTH = 1000
"""Limit on the characters of a reason; vLLM's longest message fits."""


class ProcessError(ScoremodeError):
    """A program is missing, did not start, failed, or ended while it was needed. The message ends with the error in its
    log."""


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A server that is ready for requests."""

    url: str
    log: Path
    process: Process

    async def while_it_runs(self, work: Awaitable[Result]) -> Result:
        """Return the result of `work`, which uses the server, and cancel it if the server ends first.

        ProcessError with the error in the log if the server ends first, or soon after a request in `work` failed.
        """
        working, ending = asyncio.ensure_future(work), asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                is_server_error = isinstance(working.exception(), ServerError | TransportError)
                if is_server_error:
                    await asyncio.wait({ending}, timeout=_END_SECONDS)
                if not (is_server_error and ending.done()):
                    return working.result()
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)
        raise ProcessError(f"the server ended with status {self.process.returncode}{_reason(self.log)}")


@asynccontextmanager
async def model_server(
    command: Sequence[str],
    model: str,
    flags: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    start_seconds: float,
) -> AsyncIterator[ModelServer]:
    """Run `COMMAND MODEL --host 127.0.0.1 --port PORT FLAGS`, and stop it on exit. Entered once it answers `/health`.

    The server runs in `folder`, with `environment` added to this process's environment, and prints to `log`.
    ProcessError if the command is missing, or the server ends or is not ready in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with _reserved_port() as port:
        arguments = [*_resolved(command, folder), model, "--host", "127.0.0.1", "--port", str(port), *flags]
        with log.open("wb") as output:
            # Give the server its own session, so that Ctrl-C only reaches the sweep, which stops the server.
            process = await asyncio.create_subprocess_exec(
                *_tied(arguments),
                cwd=folder,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        server = ModelServer(f"http://127.0.0.1:{port}", log, process)
        try:
            try:
                async with asyncio.timeout(start_seconds):
                    await server.while_it_runs(_healthy(server))
            except TimeoutError:
                raise ProcessError(f"the server was not ready after {start_seconds:.0f} s{_reason(log)}") from None
            yield server
        finally:
            _log.info("%s: stopping the server", log.stem)
            await _stop(process)


async def device_memory(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Device | None:
    """Ask for the memory of the GPU that `COMMAND MODEL` uses: for `scoremode serve`, `scoremode memory` tells it. None
    without an NVIDIA GPU, or for another command."""
    if shutil.which("nvidia-smi") is None or command[-1] != "serve":
        return None
    _, printed, _ = await _printed([*_resolved(command[:-1], folder), "memory"], environment, folder)
    try:
        return Device(**json.loads(printed))
    except (ValueError, TypeError):
        return None


async def candidate_paths(
    command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> list[tuple[list[str], dict[str, str]]]:
    """Ask which other paths `COMMAND ARGUMENTS` has, each as flags and environment: for `scoremode serve`, `scoremode
    paths` tells them. ProcessError if it fails, or for another command."""
    if command[-1] != "serve":
        raise ProcessError(f"{' '.join(command)} tells no paths: name those to measure (--try, vary)")
    words = [*_resolved(command[:-1], folder), "paths", *arguments]
    status, printed, errors = await _printed(words, environment, folder)
    if status:
        raise ProcessError(f"`{' '.join(words)}` ended with status {status}: {errors.strip().rpartition(chr(10))[2]}")
    return [(path["flags"], path["env"]) for path in json.loads(printed)]


async def _printed(words: list[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Run a program; returns its status and what it printed to stdout and to stderr."""
    process = await asyncio.create_subprocess_exec(
        *_tied(words),
        cwd=folder,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await process.communicate()
    return process.returncode or 0, printed.decode(errors="replace"), errors.decode(errors="replace")


def _tied(arguments: list[str]) -> list[str]:
    """Wrap a command line so that the kernel ends its process when the sweep ends, even if the sweep is killed."""
    if sys.platform != "linux":
        return arguments
    return [sys.executable, "-ISc", _TIED, str(os.getpid()), *arguments]


def _resolved(command: Sequence[str], folder: Path) -> list[str]:
    """Replace a command's name by its path. A path is relative to `folder`. A name is looked up next to this Python,
    for a virtual environment that is not activated, and then on PATH."""
    name, *rest = command
    if "/" in name:
        path = shutil.which((folder / Path(name).expanduser()).absolute())
    else:
        path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
    if path is None:
        raise ProcessError(
            f"command {name!r} not found: it comes with an extra, scoremode[cuda], or scoremode[cpu] without an NVIDIA "
            f"GPU, for the Python at {sys.executable}"
        )
    return [path, *rest]


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a free port: the kernel assigns it to no other process, but the server that starts here can bind it.

    This socket and vLLM's set SO_REUSEADDR, so both may be bound to the port while neither listens on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


async def _healthy(server: ModelServer) -> None:
    started = last_line = time.monotonic()
    async with httpx.AsyncClient(base_url=server.url, timeout=5, trust_env=False) as http:
        while True:
            if (now := time.monotonic()) - last_line > 60:
                last_line = now
                _log.info("%s: still loading after %.0f s", server.log.stem, now - started)
            with suppress(httpx.TransportError):
                async with http.stream("GET", "/health") as response:
                    if response.is_success:
                        return
            await asyncio.sleep(_POLL_SECONDS)


async def _stop(process: Process) -> None:
    """Ask the server to end, wait for it, then kill its process group, so that no engine process is left."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
    finally:
        # After a second Ctrl-C, which ends the wait, no process is left either.
        await _end_group(process)


async def _end_group(process: Process) -> None:
    """Kill a session's leader and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _reason(log: Path) -> str:
    """Find the last error in a log, with all lines of its message; without one, the log's last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # Begin at the 200th-last line that is not INFO. Earlier errors did not end the process, and when an engine dies,
    # each request in flight may add a line.
    notable = [place for place, line in enumerate(lines) if not _INFO.match(line)][-200:]
    lines = lines[notable[0] :] if notable else lines[-1:]
    # No line begins with a newline, so no line continues a message before the first error.
    before, reason = "\n", [(lines or ["it printed nothing"])[-1]]
    for line in lines:
        # vLLM repeats the prefix of a message's first line on the message's other lines.
        rest = line.removeprefix(before).lstrip()
        # A warning may name an error that could happen.
        is_error = not (_NO_ERROR.match(line) or re.search(_SUMMARY, line))
        if is_error and (match := _ERROR.search(line)):
            before, reason = line[: match.start()].rstrip(), [match[0]]
        elif line.startswith(before) and not _NEXT_MESSAGE.match(rest):
            reason.append(rest)
        else:
            before = "\n"
    return f" (log {log}): {shorten(' '.join(reason), _REASON_LENGTH, placeholder=' ...')}"


async def measure_file(program: str, gguf: Path, base: Path, log: Path) -> None:
    """Measure a GGUF file with llama-perplexity against `base`, an exported reference. Only a complete `log` exists."""
    command, partial = _command(program, gguf, base), log.with_name(f"{log.name}.partial")
    with partial.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *_tied(command), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = await process.wait()
        finally:
            await _end_group(process)
    if status:
        raise ProcessError(f"{program} ended with status {status}{_reason(partial)}")
    partial.replace(log)


def _command(program: str, gguf: Path, base: Path) -> list[str]:
    path = shutil.which(program)
    if path is None:
        raise ProcessError(f"{program} is not a program; give its path as llama_perplexity")
    if not gguf.is_file():
        raise ProcessError(f"there is no {gguf}")
    # The context length follows eight bytes that mark the format.
    [context_length] = np.fromfile(base, "<i4", count=1, offset=8)
    # Without -lv 4, llama-perplexity does not print the file's type and size.
    return [
        path,
        "-m",
        str(gguf),
        "--kl-divergence-base",
        str(base),
        "--kl-divergence",
        "-c",
        str(context_length),
        "-lv",
        "4",
    ]
