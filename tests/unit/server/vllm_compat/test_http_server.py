"""Connections that the HTTP server ends, and requests that offer another protocol, over sockets."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from uvicorn import Config
from vllm.entrypoints.launchers.launcher import NoSignalServer

from scoremode_server.vllm_compat import http_server

HEADER = b"GET %s HTTP/1.1\r\nHost: server\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Serving:
    """An app on a port of its own."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        http_server.change_http_server(app)
        self.server = app.state.server = NoSignalServer(Config(app, log_level="critical", **options))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.ended = asyncio.create_task(self.server.serve([self._listener]))

    async def connect(self, *sent: bytes) -> Connection:
        reader, writer = await asyncio.open_connection(*self._listener.getsockname())
        writer.write(b"".join(sent))
        return reader, writer


async def test_a_client_that_reads_nothing_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "CLOSE_SECONDS", 0.1)
    app = FastAPI()

    @app.get("/")
    async def endless() -> StreamingResponse:
        async def zeros() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(1 << 20)

        return StreamingResponse(zeros())

    serving = Serving(app)
    reader, writer = await serving.connect(HEADER % b"/", b"\r\n")
    await reader.readline()
    serving.server.should_exit = True
    await asyncio.wait_for(serving.ended, 60)
    writer.close()


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
"""As Java 11 to 21 sends them with the first request of a connection."""
POST = HEADER.replace(b"GET", b"POST") % b"/"
WITH_BODY = POST + H2C + b"Content-Length: 10\r\n\r\n0123456789"
IN_CHUNKS = POST + H2C + b"Transfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n6\r\n456789\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_", [WITH_BODY, IN_CHUNKS, WITH_BODY.replace(b"h2c", b"TLS/1.0")], ids=["h2c", "in chunks", "TLS"]
)
async def test_a_body_is_read_whatever_protocol_its_request_offers(request_: bytes):
    app = FastAPI()

    @app.post("/")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.websocket("/")
    async def hello(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")

    serving = Serving(app)
    plain = POST + b"Content-Length: 3\r\n\r\nabc"
    for cut in (0, 20, len(POST) + 30, request_.index(b"\r\n\r\n") + 4, len(request_) - 3):
        reader, writer = await serving.connect(request_[:cut])
        await asyncio.sleep(0.02)
        # The next one, on the same connection, comes before the answer.
        writer.write(request_[cut:] + plain)
        for body in (b"10", b"3"):
            assert (await reader.readline()).split()[1] == b"200"
            assert (await reader.readuntil(b"\r\n\r\n") and await reader.readexactly(len(body))) == body
        writer.close()
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    reader, writer = await serving.connect(HEADER % b"/", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", key)
    assert (await reader.readline()).split()[1] == b"101"
    assert (await reader.readuntil(b"hello")).endswith(b"hello")
    writer.close()
    serving.server.should_exit = True
    await asyncio.wait_for(serving.ended, 60)
