"""Connections that the HTTP server ends."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from uvicorn import Config
from vllm.entrypoints.launchers.launcher import NoSignalServer

from scoremode_server.vllm_patches import shutdown

HEADER = b"GET %s HTTP/1.1\r\nHost: server\r\n"
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
