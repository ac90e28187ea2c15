"""`/v1/references`: recording, resuming, refusing, listing and deleting, on an engine with real windows and files."""

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode_server.prefix_cache.admission import EngineSize
from scoremode_server.references import tensor_files
from scoremode_server.references.directory import StoredReference
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.calls import BODY, NUM_WINDOWS, TOKENS, app_of, client_of, error_of, events, record
from tests.unit.server.api.light_app import light_app
from tests.unit.server.references.reference_setup import files
from tests.unit.server.scoring.fake_reference_engine import ReferenceEngine

BASE = f"{REFERENCES}/base"


@pytest.fixture
def engine(tmp_path: Path) -> ReferenceEngine:
    return ReferenceEngine(tmp_path)


async def test_a_recording_is_streamed_and_described(engine):
    async with client_of(app_of(engine)) as client:
        *windows, recorded = events(await client.post(REFERENCES, json={**BODY, "stream": True}))
    assert sorted(engine.computed) == [("record", index) for index in range(NUM_WINDOWS)]
    assert len(windows) == NUM_WINDOWS
    nlls: list[float] = []
    for index, progress in enumerate(windows):
        token_ids, first = engine.directory.open("base").text.window(index)
        states = engine.model.hidden_states(token_ids[:-1])[first - 1 :]
        logprobs = (states @ engine.model.weight.T).log_softmax(1)[range(len(states)), token_ids[first:]]
        nlls += (-logprobs).tolist()
        assert (progress["index"], progress["num_windows"]) == (index, NUM_WINDOWS)
        assert (progress["num_scored"], progress["total_scored"]) == (len(logprobs), len(nlls))
        assert progress["perplexity"] == pytest.approx(math.exp(np.mean(nlls)))
    assert (recorded["complete"], recorded["name"], recorded["model"]) == (True, "base", "a/model")
    assert recorded["num_windows"] == recorded["num_recorded"] == NUM_WINDOWS
    assert (recorded["num_scored"], recorded["num_tokens"], recorded["num_bytes"]) == (len(nlls), len(TOKENS), None)
    assert (recorded["vocab_size"], recorded["noise_floor"]) == (1000, None)
    assert recorded["disk_bytes"] == sum(map(len, files(engine.directory.root).values()))
    assert math.log(recorded["perplexity"]) == pytest.approx(recorded["nll_mean"]) == pytest.approx(np.mean(nlls))


async def test_the_same_request_again_records_nothing(engine):
    async with client_of(app_of(engine)) as client:
        first, second = await asyncio.gather(record(client), record(client))
        assert first == second
        before = files(engine.directory.root)
        engine.computed.clear()
        assert await record(client) == first
        assert events(await client.post(REFERENCES, json={**BODY, "stream": True})) == [first]
    assert not engine.computed
    assert files(engine.directory.root) == before


async def test_an_interrupted_recording_resumes(engine):
    """Existing windows stay as they are, byte for byte, and count in the progress."""
    async with client_of(app_of(engine)) as client:
        whole = await record(client)
        before = files(engine.directory.root / "base" / "windows")
        reference = engine.directory.open("base")
        missing = [1, 4]
        for index in missing:
            reference.shard(index).unlink()
        left = reference.path / "windows" / ".000001.safetensors.left-by-a-killed-server"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
        reference.save(reference.manifest.model_copy(update={"result": None}))
        found = (await client.get(BASE)).json()
        assert (found["complete"], found["num_recorded"]) == (False, NUM_WINDOWS - 2)
        times = {path: path.stat().st_mtime_ns for path in reference.path.glob("windows/0*")}
        engine.computed.clear()
        *windows, finished = events(await client.post(REFERENCES, json={**BODY, "stream": True}))
    assert sorted(engine.computed) == [("record", index) for index in missing]
    assert [window["index"] for window in windows] == missing
    first_windows = [engine.directory.open("base").read_shard(index)[1] for index in range(2)]
    assert windows[0]["total_scored"] == sum(map(len, first_windows))
    assert windows[0]["perplexity"] == pytest.approx(math.exp(-torch.cat(first_windows).double().mean()))
    assert finished == whole
    assert files(engine.directory.root / "base" / "windows") == before
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.parametrize("complete", [True, False])
async def test_damaged_files_are_recorded_again(engine, complete):
    async with client_of(app_of(engine)) as client:
        await record(client)
        before = files(engine.directory.root)
        reference = engine.directory.open("base")
        if not complete:
            reference.save(reference.manifest.model_copy(update={"result": None}))
        reference.shard(3).write_bytes(before["base/windows/000003.safetensors"][:-1])
        (reference.path / "lm_head.safetensors").write_bytes(b"")
        engine.computed.clear()
        await record(client)
    assert engine.computed == [("record", 3)]
    assert files(engine.directory.root) == before


@pytest.mark.parametrize(
    ("changes", "identity", "message"),
    [
        ({"prompt": TOKENS[:-1]}, {}, "another text or other windows"),
        ({"stride": 4}, {}, "another text or other windows"),
        ({"method": "overlapping"}, {}, "another text or other windows"),
        ({}, {"fingerprint": "of another"}, "another model"),
    ],
)
async def test_other_content_under_the_same_name_is_refused(engine, changes, identity, message):
    async with client_of(app_of(engine)) as client:
        await record(client)
    before = files(engine.directory.root)
    async with client_of(app_of(engine, **identity)) as client:
        answer = error_of(await client.post(REFERENCES, json={**BODY, **changes}))
    assert answer == (409, "name", f"there is a reference 'base' already, of {message}")
    assert files(engine.directory.root) == before


async def test_a_model_whose_logits_cannot_be_stored_is_refused(engine):
    engine.head = "this model's LM head is quantized (AWQ)"
    async with client_of(app_of(engine)) as client:
        answer = error_of(await client.post(REFERENCES, json=BODY))
    assert answer == (400, "model", "this model cannot be a reference: this model's LM head is quantized (AWQ)")
    assert not files(engine.directory.root)


async def test_references_are_listed_by_name_and_deleted(engine, monkeypatch):
    def refused(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    async with client_of(app_of(engine)) as client:
        assert (await client.get(REFERENCES)).json() == {"object": "list", "data": []}
        second, first = await record(client), await record(client, name="a")
        assert (await client.get(REFERENCES)).json()["data"] == [first, second]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refused)
            status, param, message = error_of(await client.delete(BASE))
        assert (status, param) == (507, "name")
        assert message.endswith("Permission denied")
        assert (await client.get(BASE)).json() == second
        deleted = (await client.delete(BASE)).json()
        assert deleted == {"object": "reference.deleted", "name": "base", "deleted": True}
        for method in ("GET", "DELETE"):
            answer = error_of(await client.request(method, BASE))
            assert answer == (404, "name", "there is no reference 'base'")
        assert (await client.get(REFERENCES)).json()["data"] == [first]
    assert {path.name for path in engine.directory.root.iterdir()} == {"a"}


async def test_a_damaged_manifest_is_reported_and_not_listed(engine):
    async with client_of(app_of(engine)) as client:
        await record(client)
        (engine.directory.root / "base" / "manifest.json").write_text('{"format_version": 7}')
        for answer in (await client.get(BASE), await client.post(REFERENCES, json=BODY)):
            status, param, message = error_of(answer)
            assert (status, param) == (409, "name")
            assert "manifest.json: it has format version 7" in message
        assert (await client.get(REFERENCES)).json()["data"] == []


async def test_nan_of_the_model_ends_the_recording_and_is_not_stored(engine):
    engine.nan_at = 2
    async with client_of(app_of(engine)) as client:
        status, _, message = error_of(await client.post(REFERENCES, json=BODY))
        assert status == 500
        assert "position 3" in message
        engine.nan_at = None
        assert (await record(client))["complete"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disk_that_is_full_ends_the_recording(engine, monkeypatch, stream):
    """At the third window, then at the first file of another reference."""
    write_shard = StoredReference.write_shard

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def full_later(reference: StoredReference, index: int, *tensors: Any) -> None:
        (full if index == 2 else write_shard)(reference, index, *tensors)

    async with client_of(app_of(engine)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(StoredReference, "write_shard", full_later)
            answer = await client.post(REFERENCES, json={**BODY, "stream": stream})
            message = events(answer)[-1]["error"]["message"] if stream else error_of(answer)[2]
            assert "reference 'base' could not be written: [Errno 28] No space left on device" in message
            assert answer.status_code == (200 if stream else 507)
            assert not (await client.get(BASE)).json()["complete"]
        assert (await record(client))["complete"]
        before = files(engine.directory.root)
        monkeypatch.setattr(tensor_files, "save_file", full)
        status, param, message = error_of(await client.post(REFERENCES, json={**BODY, "name": "b", "stream": stream}))
        assert (status, param) == (507, "name")
        assert "No space left" in message
    assert files(engine.directory.root) == before


async def test_a_reference_may_be_deleted_while_it_is_recorded(engine):
    engine.held.clear()
    async with client_of(app_of(engine)) as client:
        recording = asyncio.create_task(client.post(REFERENCES, json=BODY))
        await engine.has_any.wait()
        await client.delete(BASE)
        engine.held.set()
        await record(client, prompt=TOKENS[10:])
        status, _, message = error_of(await recording)
    assert status in (404, 409, 507)
    assert "base" in message
    assert engine.directory.open("base").manifest.text.num_tokens == len(TOKENS) - 10


async def test_windows_enter_the_queue_only_as_the_engine_needs_them(engine):
    """So that there is room for other requests."""
    size = EngineSize(tokens=48, sequences=192, max_scoring_tokens=100)
    app = light_app(engine=engine, references=engine.references(), size=size)
    engine.held.clear()
    async with client_of(app) as client:
        recording = asyncio.create_task(client.post(REFERENCES, json={**BODY, "stride": 1}))
        await engine.has_any.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        # As many are written as are computed.
        assert 6 * 16 <= app.state.scoremode.admission.num_tokens <= 7 * 16
        engine.held.set()
        assert (await recording).status_code == 200
