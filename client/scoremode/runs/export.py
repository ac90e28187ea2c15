"""Exports a reference as the base file of llama.cpp's `llama-perplexity --kl-divergence-base`, for `ppl-client export`
and for Python. The server computes the log-probabilities."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO

from scoremode._tasks import in_thread
from scoremode.client import AsyncScoreClient
from scoremode.errors import OutputError, RateLimitError, ResponseError, ServerError, TransportError, file_errors
from scoremode.runs.journal import open_locked
from scoremode.wire.base_file import BaseFile

_log = logging.getLogger(__name__)

OnBytes = Callable[[int, int], object]
"""Called with the number of bytes written so far, and the size of the whole file."""


async def export_llama_cpp(
    client: AsyncScoreClient, name: str, path: Path, *, force: bool = False, on_bytes: OnBytes | None = None
) -> int:
    """Write the distributions of a complete reference to a file for llama.cpp, and return its size in bytes.

    The reference must be recorded with method `llama.cpp`. The file appears under its name when it is complete. Until
    then a partial file is next to it, from which the same call resumes. `force` replaces an earlier file.

    Raises:
        OutputError: the file exists, cannot be written, is in use by another process, or does not fit on the disk.
        ScoremodeError: the server fails, or refuses the reference.
    """
    if not force and await in_thread(path.exists):
        raise OutputError(f"{path} exists; --force replaces it")
    reference = await client.reference(name)
    layout = BaseFile(reference.context_length, reference.num_windows, reference.num_scored, reference.vocab_size)
    identity = hashlib.sha256(f"{reference.fingerprint} {reference.text_fingerprint}".encode()).hexdigest()
    partial = path.with_name(f"{path.name}.{identity[:12]}.partial")
    with file_errors(OutputError, f"write {partial}"), BufferedWriter(open_locked(partial)) as file:
        await _fill(client, name, layout, file, path, on_bytes)
        file.flush()
        partial.replace(path)
    return layout.size


async def _fill(
    client: AsyncScoreClient, name: str, layout: BaseFile, file: BinaryIO, path: Path, on_bytes: OnBytes | None
) -> None:
    num_done = layout.num_complete(file.tell())
    missing, free = layout.size - layout.end_of(num_done), shutil.disk_usage(path.parent).free
    _log.info("%s will have %s bytes; %s are still to be written", path, f"{layout.size:,}", f"{missing:,}")
    if missing > free:
        raise OutputError(f"{path} needs {missing:,} bytes more, and its disk has {free:,}")

    def write(chunk: bytes) -> None:
        if file.tell() + len(chunk) > layout.size:
            raise ResponseError(f"the server sends more than the {layout.size:,} bytes of the file")
        file.write(chunk)
        if on_bytes is not None:
            on_bytes(file.tell(), layout.size)

    while file.truncate(layout.end_of(num_done)) < layout.size:
        file.seek(0, os.SEEK_END)
        try:
            await client.llama_cpp_base(name, num_done, write)
        except (TransportError, ServerError, RateLimitError):
            # Try again if the server has sent a window since the last attempt.
            if layout.num_complete(file.tell()) == num_done:
                raise
        else:
            if file.tell() < layout.size:
                raise ResponseError(f"the server ended after {file.tell():,} of the {layout.size:,} bytes of the file")
        num_done = layout.num_complete(file.tell())
