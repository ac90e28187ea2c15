"""How the HTTP server ends."""

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from uvicorn import Config
from vllm.entrypoints.launchers.launcher import NoSignalServer

from scoremode_server.vllm_patches import shutdown


async def test_a_client_that_reads_nothing_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutdown, "CLOSE_SECONDS", 0.1)
    app = FastAPI()

    @app.get("/")
    async def endless() -> StreamingResponse:
        async def zeros() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(1 << 20)

        return StreamingResponse(zeros())

    shutdown.bound_connections(app)
    server = app.state.server = NoSignalServer(Config(app, log_level="critical"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
    await reader.readline()
    server.should_exit = True
    await asyncio.wait_for(serving, 60)
    writer.close()
