"""Limits what a client reads before an answer's body: httpx itself reads any number of informational responses, such as
`103 Early Hints`. h11 limits the size of each head, and `wire.calls` that of the body."""

from typing import Any

import httpx

from scoremode.errors import ResponseError

MAX_READS, READ_BYTES = 1024, 4096
"""Limits on reads between a request and the end of its answer's head, and on bytes per read: 4 MiB in all."""


def watch(event: str, info: dict[str, Any]) -> None:
    """Limit the heads that are read from a new connection. httpx's `trace` extension calls this."""
    if event.endswith(("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")):
        _bound(info["return_value"])


def end_head(response: httpx.Response) -> None:
    """Lift the limit on a response's connection, so that it reads a body of any length."""
    response.extensions.get("network_stream", response).num_head_reads = None


def _bound(stream: Any) -> None:
    """Limit a network stream's reads until `end_head` lifts the limit. The stream may also be asynchronous."""
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
