"""Exports of references that are read slowly: their memory together."""

import asyncio

from scoremode_server.references import comparer
from tests.bad_inputs import REFERENCES
from tests.unit.server.engine.fake_engine import VOCABULARY
from tests.unit.server.light_app import client_of, error_of, leaving, light_app
from tests.unit.server.references.reference_engine import ReferenceEngine, record

EXPORT = f"{REFERENCES}/base/llama.cpp"
NUM_WINDOWS = 7
WINDOW_BYTES = 7 * (VOCABULARY + 4) * 2
"""Of 16 tokens, of which 7 are scored: two bytes for each token of the vocabulary, and 8 more."""


async def test_slow_readers_hold_a_bounded_number_of_windows_together(tmp_path, monkeypatch):
    monkeypatch.setattr(comparer, "BYTES_AHEAD", 2 * WINDOW_BYTES)
    monkeypatch.setattr(comparer, "EXPORTED_BYTES", 4 * WINDOW_BYTES)
    app, leave = light_app(engine := ReferenceEngine(tmp_path)), asyncio.Event()
    async with client_of(app) as client:
        await record(client, prompt=[each % 997 for each in range(NUM_WINDOWS * 16)], method="llama.cpp", stride=None)
        whole = (await client.get(EXPORT)).content
        assert len(whole) > NUM_WINDOWS * WINDOW_BYTES
        engine.computed.clear()
        slow = [asyncio.create_task(leaving(app, EXPORT, None, leave, read=leave.wait, method="GET")) for _ in range(2)]
        while len(engine.computed) < 2 * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(engine.computed) == 2 * 2
        answer = await client.get(EXPORT)
        assert error_of(answer)[0] == 429
        assert int(answer.headers["Retry-After"]) > 0
        # Others are served.
        assert (await client.get(f"{REFERENCES}/base")).status_code == 200
        leave.set()
        await asyncio.gather(*slow)
        assert (await client.get(EXPORT)).content == whole
