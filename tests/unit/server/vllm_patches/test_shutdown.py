"""Connections that the HTTP server ends, and those that last longer for another reason."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from uvicorn import Config
from vllm.entrypoints.launchers.launcher import NoSignalServer

from scoremode_server.vllm_patches import shutdown

HEADER = b"GET %s HTTP/1.1\r\nHost: server\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s==\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Serving:
    """An app on a port of its own."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        shutdown.bound_connections(app)
        self.server = app.state.server = NoSignalServer(Config(app, log_level="critical", **options))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.ended = asyncio.create_task(self.server.serve([self._listener]))

    async def connect(self, *sent: bytes) -> Connection:
        reader, writer = await asyncio.open_connection(*self._listener.getsockname())
        writer.write(b"".join(sent))
        return reader, writer


async def test_a_client_that_reads_nothing_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutdown, "CLOSE_SECONDS", 0.1)
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


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_header_must_be_there_in_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch, http: str):
    monkeypatch.setattr(shutdown, "HEADER_SECONDS", 0.3)
    app, all_closed = FastAPI(), asyncio.Event()

    @app.get("/later")
    async def later() -> int:
        await all_closed.wait()
        return 2

    @app.websocket("/socket")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await all_closed.wait()
        await websocket.send_text("3")

    serving = Serving(app, http=http)
    lasting = await serving.connect(HEADER % b"/later", b"\r\n")
    talking = await serving.connect(HEADER % b"/socket", UPGRADE % (b"a" * 22), b"\r\n")
    silent, half = await serving.connect(), await serving.connect(HEADER % b"/later")
    async with asyncio.timeout(60):
        for reader, _ in (silent, half):
            assert await reader.read() == b""
        all_closed.set()
        assert (await lasting[0].readuntil(b"\r\n\r\n2")).startswith(b"HTTP/1.1 200")
        assert (await talking[0].readuntil(b"\x81\x013")).startswith(b"HTTP/1.1 101")
        lasting[1].write(HEADER % b"/later")
        assert await lasting[0].read() == b""
        serving.server.should_exit = True
        for _, writer in (lasting, talking, silent, half):
            writer.close()
        await serving.ended
