"""Bounds what a server sends before an answer. By itself httpx reads informational responses, such as `103 Early
Hints`, without end. All later parts of an answer are bounded by h11, or by their reader."""

from typing import Any

import httpx

from scoremode.errors import ResponseError

MAX_READS, READ_BYTES = 1024, 4096
"""Reads between a request and the end of the head of its answer, and bytes that each may bring: 4 MiB in all."""


def watch(event: str, info: dict[str, Any]) -> None:
    """Bound the heads that a new connection brings: for httpx's `trace` extension."""
    if event.endswith(("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")):
        _bound(info["return_value"])


def end_head(response: httpx.Response) -> None:
    """Let a response's connection read a body of any length."""
    response.extensions.get("network_stream", response).num_head_reads = None


def _bound(stream: Any) -> None:
    """Count the reads of a network stream, whose methods are coroutine functions or not."""
    read, write = stream.read, stream.write

    def write_request(*data: Any, **options: Any) -> Any:
        stream.num_head_reads = 0
        return write(*data, **options)

    def read_answer(max_bytes: int, timeout: float | None = None) -> Any:
        if stream.num_head_reads is None:
            return read(max_bytes, timeout)
        stream.num_head_reads += 1
        if stream.num_head_reads > MAX_READS:
            raise ResponseError(f"the server sent {MAX_READS} parts without an answer, such as informational responses")
        return read(min(max_bytes, READ_BYTES), timeout)

    stream.read, stream.write, stream.num_head_reads = read_answer, write_request, 0
