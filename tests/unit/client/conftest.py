"""Fixtures that let one test speak for both clients."""

import asyncio
import threading
import time

import httpx
import pytest

from scoremode import AsyncScoreClient, ScoreClient
from scoremode.wire import retries as _retries


@pytest.fixture(autouse=True)
def no_api_key_from_outside(monkeypatch):
    monkeypatch.delenv("SCOREMODE_API_KEY", raising=False)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that a client wanted to sleep; it does not."""
    wanted = []
    sleep, this_thread = time.sleep, threading.get_ident()

    def note(seconds):
        # Other threads sleep on, such as the one that waits for a server.
        wanted.append(seconds) if threading.get_ident() == this_thread else sleep(seconds)

    async def note_async(seconds):
        note(seconds)

    monkeypatch.setattr(time, "sleep", note)
    monkeypatch.setattr(asyncio, "sleep", note_async)
    return wanted


@pytest.fixture
def clock(monkeypatch, waits):
    """For retries, time passes only while a client wants to sleep."""
    monkeypatch.setattr(_retries, "monotonic", lambda: sum(waits))


@pytest.fixture(params=["sync", "async"])
def call(request):
    """`call(handler, method, *arguments)`: call a client's method, where `handler` answers in the server's place, or,
    as a text, is the address of a server."""

    def run(handler, method, /, *arguments, client=None, **fields):
        if isinstance(handler, str):
            settings = {"base_url": handler}
        else:
            settings = {"base_url": "http://fake:8000", "transport": httpx.MockTransport(handler)}
        settings |= client or {}
        if request.param == "sync":
            with ScoreClient(**settings) as sync_client:
                return getattr(sync_client, method)(*arguments, **fields)

        async def awaited():
            async with AsyncScoreClient(**settings) as async_client:
                return await getattr(async_client, method)(*arguments, **fields)

        return asyncio.run(awaited())

    return run
