"""Connections on which no whole header arrives, and those that last longer for another reason."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from uvicorn import Config
from vllm.entrypoints.launchers.launcher import NoSignalServer

from scoremode_server.vllm_patches import header_timeout, shutdown

HEADER = b"GET %s HTTP/1.1\r\nHost: server\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s==\r\n"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_header_must_be_there_in_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch, http: str):
    app, all_closed, begun = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.get("/now")
    async def now() -> int:
        return 1

    @app.get("/later")
    async def later() -> int:
        begun.set()
        await all_closed.wait()
        return 2

    @app.websocket("/socket")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await all_closed.wait()
        await websocket.send_text("3")

    timers: list[tuple[asyncio.TimerHandle, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def recorded(seconds: float, callback: Any, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(seconds, callback, *arguments, **options)
        if seconds == header_timeout.HEADER_SECONDS:
            timers.append((timer, callback))
        return timer

    monkeypatch.setattr(header_timeout, "HEADER_SECONDS", 12_345)
    monkeypatch.setattr(loop, "call_later", recorded)
    shutdown.bound_connections(app)
    server = app.state.server = NoSignalServer(Config(app, log_level="critical", http=http))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))

    async def connect(*sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"".join(sent))
        return reader, writer

    lasting = await connect(HEADER % b"/later", b"\r\n")
    talking = await connect(HEADER % b"/socket", UPGRADE % (b"a" * 22), b"\r\n")
    silent, half = await connect(), await connect(HEADER % b"/now")
    second = await connect(HEADER % b"/now", b"\r\n")
    async with asyncio.timeout(60):
        await begun.wait()
        assert (await talking[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        assert (await second[0].readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200")
        second[1].write(HEADER % b"/now")
        while len(timers) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        end = [callback for timer, callback in timers if not timer.cancelled()]
        assert len(end) == 3
        for close in end:
            close()
        for reader, _ in (silent, half, second):
            assert await reader.read() == b""
        all_closed.set()
        assert (await lasting[0].readuntil(b"\r\n\r\n2")).startswith(b"HTTP/1.1 200")
        assert await talking[0].readexactly(3) == b"\x81\x013"
        server.should_exit = True
        for _, writer in (lasting, talking, silent, half, second):
            writer.close()
        await serving
