"""Exports of references: their memory together, and clients that leave or do not read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from scoremode_server.api.requests import CLIENT_CLOSED_REQUEST
from scoremode_server.scoring import comparer
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, error_of, leaving, light_app
from tests.unit.server.api.reference_engine import ReferenceEngine, record
from tests.unit.server.prefix_cache.fake_engine import VOCABULARY

EXPORT = f"{REFERENCES}/base/llama.cpp"
NUM_WINDOWS = 7
WINDOW_BYTES = 7 * (VOCABULARY + 4) * 2
"""Of 16 tokens, of which 7 are scored: two bytes for each token of the vocabulary, and 8 more."""


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[FastAPI, ReferenceEngine, Any]]:
    app = light_app(engine := ReferenceEngine(root))
    async with client_of(app) as client:
        await record(client, prompt=[each % 997 for each in range(NUM_WINDOWS * 16)], method="llama.cpp", stride=None)
        engine.computed.clear()
        yield app, engine, client


async def stalled(app: FastAPI, leave: asyncio.Event) -> list[dict[str, Any]]:
    """A client that reads nothing of an export until it leaves."""
    return await leaving(app, EXPORT, None, leave, read=leave.wait, method="GET")


async def settled(engine: ReferenceEngine, num_computed: int) -> None:
    while len(engine.computed) < num_computed:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert len(engine.computed) == num_computed


async def test_slow_readers_hold_a_bounded_number_of_windows_together(tmp_path, monkeypatch):
    monkeypatch.setattr(comparer, "BYTES_AHEAD", 2 * WINDOW_BYTES)
    monkeypatch.setattr(comparer, "EXPORTED_BYTES", 4 * WINDOW_BYTES)
    async with serving(tmp_path) as (app, engine, client):
        whole = (await client.get(EXPORT)).content
        assert len(whole) > NUM_WINDOWS * WINDOW_BYTES
        engine.computed.clear()
        leave = asyncio.Event()
        slow = [asyncio.create_task(stalled(app, leave)) for _ in range(2)]
        await settled(engine, 2 * 2)
        answer = await client.get(EXPORT)
        assert error_of(answer)[0] == 429
        assert int(answer.headers["Retry-After"]) > 0
        # Others are served.
        assert (await client.get(f"{REFERENCES}/base")).status_code == 200
        leave.set()
        await asyncio.gather(*slow)
        assert (await client.get(EXPORT)).content == whole


async def test_an_export_whose_client_leaves_before_its_first_window_ends(tmp_path):
    async with serving(tmp_path) as (app, engine, _):
        engine.let_go.clear()
        leave = asyncio.Event()
        leaves = asyncio.create_task(stalled(app, leave))
        while not engine.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        leave.set()
        assert (await asyncio.wait_for(leaves, 60))[0]["status"] == CLIENT_CLOSED_REQUEST
        assert engine.num_running == 0
