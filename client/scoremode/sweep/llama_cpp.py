"""llama.cpp's llama-perplexity on a GGUF file, against the first model of a sweep."""

import asyncio
import shutil
import struct
from collections import deque
from pathlib import Path

from scoremode.errors import ScoremodeError
from scoremode.sweep.server import end_group

_HEADER = struct.Struct("<8si")
"""The first fields of the base file: its mark and the context length."""


class LlamaCppError(ScoremodeError):
    """llama-perplexity is missing, or failed; the message ends with the last line that it printed."""


async def measure_file(program: str, gguf: Path, base: Path, log: Path) -> None:
    """Compare a GGUF file with the base file that was exported of a reference; the log appears when it is whole."""
    command, partial = _command(program, gguf, base), log.with_name(f"{log.name}.partial")
    with partial.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = await process.wait()
        finally:
            await end_group(process)
    if status:
        lines = deque(filter(str.strip, partial.read_text(errors="replace").splitlines()), maxlen=1)
        raise LlamaCppError(f"{program} ended with status {status} (log {partial}): {''.join(lines).strip()}")
    partial.replace(log)


def _command(program: str, gguf: Path, base: Path) -> list[str]:
    path = shutil.which(program)
    if path is None:
        raise LlamaCppError(f"{program} is not a program; give its path as llama_perplexity")
    if not gguf.is_file():
        raise LlamaCppError(f"there is no {gguf}")
    with base.open("rb") as file:
        header = file.read(_HEADER.size)
    context_length = _HEADER.unpack(header)[1]
    # By default it says nothing of the file's type and size.
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
