"""`/v1/references`: recording, going on, refusing, listing and deleting, on an engine with real windows and files."""

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
from scoremode_server.scoring import recorder
from tests.unit.server.api.light_app import light_app
from tests.unit.server.api.reference_requests import (
    BODY,
    NUM_WINDOWS,
    TOKENS,
    app_of,
    client_of,
    error_of,
    events,
    is_idle,
    record,
)
from tests.unit.server.references.reference_setup import files
from tests.unit.server.scoring.fake_reference_engine import ReferenceEngine


@pytest.fixture
def engine(tmp_path: Path) -> ReferenceEngine:
    return ReferenceEngine(tmp_path)


def shards(engine: ReferenceEngine) -> dict[str, bytes]:
    return files(engine.directory.root / "base" / "windows")


async def test_a_recording_is_the_models_own(engine: ReferenceEngine):
    async with client_of(app := app_of(engine)) as client:
        recorded = await record(client)
    assert is_idle(app)
    assert sorted(engine.computed) == [("record", index) for index in range(NUM_WINDOWS)]
    reference = engine.directory.open("base")
    nlls = []
    for index in range(NUM_WINDOWS):
        token_ids, first = reference.text.window(index)
        states = engine.model.hidden_states(token_ids[:-1])[first - 1 :]
        hidden_states, logprobs = reference.read_shard(index)
        assert torch.equal(hidden_states, states)
        expected = (states @ engine.model.weight.T).log_softmax(1).gather(1, torch.tensor(token_ids[first:])[:, None])
        assert torch.allclose(logprobs, expected[:, 0])
        nlls += (-logprobs.double()).tolist()
    assert torch.equal(reference.read_head()[0], engine.model.weight)
    assert len(nlls) == len(TOKENS) - 1
    described = {
        "complete": True,
        "name": "base",
        "model": "a/model",
        "vocab_size": 1000,
        "num_windows": NUM_WINDOWS,
        "num_recorded": NUM_WINDOWS,
        "num_scored": len(nlls),
        "num_tokens": len(TOKENS),
        "num_bytes": None,
        "disk_bytes": sum(map(len, files(engine.directory.root).values())),
        "noise_floor": None,
    }
    assert {name: recorded[name] for name in described} == described
    assert recorded["nll_mean"] == pytest.approx(np.mean(nlls))
    assert recorded["perplexity"] == pytest.approx(math.exp(np.mean(nlls)))


async def test_a_stream_tells_each_window_and_then_the_reference(engine: ReferenceEngine):
    async with client_of(app_of(engine)) as client:
        *windows, reference = events(await client.post("/v1/references", json={**BODY, "stream": True}))
    assert [window["index"] for window in windows] == list(range(NUM_WINDOWS))
    assert [window["num_windows"] for window in windows] == [NUM_WINDOWS] * NUM_WINDOWS
    totals = np.cumsum([window["num_scored"] for window in windows])
    assert [window["total_scored"] for window in windows] == totals.tolist()
    assert windows[-1]["perplexity"] == pytest.approx(reference["perplexity"])
    assert reference["complete"]


async def test_the_same_request_again_records_nothing_and_changes_nothing(engine: ReferenceEngine):
    async with client_of(app_of(engine)) as client:
        recorded = await record(client)
        before = files(engine.directory.root)
        engine.computed.clear()
        assert await record(client) == recorded
        assert events(await client.post("/v1/references", json={**BODY, "stream": True})) == [recorded]
    assert not engine.computed
    assert files(engine.directory.root) == before


async def test_an_interrupted_recording_goes_on(engine: ReferenceEngine):
    """What is there stays byte for byte; what is told counts it in."""
    async with client_of(app_of(engine)) as client:
        whole = await record(client)
        before = shards(engine)
        reference = engine.directory.open("base")
        missing = [1, 4]
        for index in missing:
            reference.shard(index).unlink()
        left = reference.path / "windows" / ".000001.safetensors.left-by-a-killed-server"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
        reference.save(reference.manifest.model_copy(update={"result": None}))
        found = (await client.get("/v1/references/base")).json()
        assert (found["complete"], found["num_recorded"]) == (False, NUM_WINDOWS - 2)
        kept = [reference.shard(index) for index in range(NUM_WINDOWS) if index not in missing]
        times = [path.stat().st_mtime_ns for path in kept]
        engine.computed.clear()
        *windows, finished = events(await client.post("/v1/references", json={**BODY, "stream": True}))
    assert sorted(engine.computed) == [("record", index) for index in missing]
    assert [window["index"] for window in windows] == missing
    first_windows = [engine.directory.open("base").read_shard(index)[1] for index in range(2)]
    assert windows[0]["total_scored"] == sum(map(len, first_windows))
    assert windows[0]["perplexity"] == pytest.approx(math.exp(-torch.cat(first_windows).double().mean()))
    assert finished == whole
    assert shards(engine) == before
    assert times == [path.stat().st_mtime_ns for path in kept]


@pytest.mark.parametrize("complete", [True, False])
async def test_what_is_damaged_is_recorded_again(engine: ReferenceEngine, complete: bool):
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
async def test_other_content_under_the_name_is_refused(
    engine: ReferenceEngine, changes: dict[str, Any], identity: dict[str, str], message: str
):
    async with client_of(app_of(engine)) as client:
        await record(client)
    before = files(engine.directory.root)
    async with client_of(app_of(engine, **identity)) as client:
        status, param, text = error_of(await client.post("/v1/references", json={**BODY, **changes}))
    assert (status, param) == (409, "name")
    assert text == f"there is a reference 'base' already, of {message}"
    assert files(engine.directory.root) == before


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 129, "a b", "bäse\n"])
async def test_names_that_are_none_are_refused(engine: ReferenceEngine, name: str):
    async with client_of(app_of(engine)) as client:
        status, param, _ = error_of(await client.post("/v1/references", json={**BODY, "name": name}))
    assert (status, param) == (400, "name")
    assert not files(engine.directory.root)


async def test_a_model_whose_logits_cannot_be_kept_is_refused(engine: ReferenceEngine):
    engine.head = "this model's LM head is quantized (AWQ)"
    async with client_of(app_of(engine)) as client:
        answer = error_of(await client.post("/v1/references", json=BODY))
    assert answer == (400, "model", "this model cannot be a reference: this model's LM head is quantized (AWQ)")
    assert not files(engine.directory.root)


async def test_a_server_without_a_folder_says_how_to_get_one():
    async with client_of(light_app()) as client:
        for method, path in (
            ("GET", "/v1/references"),
            ("GET", "/v1/references/base"),
            ("DELETE", "/v1/references/base"),
            ("POST", "/v1/references"),
            ("POST", "/v1/kld"),
        ):
            body = None if method != "POST" else BODY if path == "/v1/references" else {"reference": "base"}
            status, _, message = error_of(await client.request(method, path, json=body))
            assert status == 404
            assert "--reference-dir DIR" in message


async def test_listing_getting_and_deleting(engine: ReferenceEngine):
    async with client_of(app_of(engine)) as client:
        assert (await client.get("/v1/references")).json() == {"object": "list", "data": []}
        second, first = await record(client, name="b"), await record(client, name="a")
        assert (await client.get("/v1/references")).json()["data"] == [first, second]
        assert (await client.get("/v1/references/a")).json() == first
        deleted = (await client.delete("/v1/references/a")).json()
        assert deleted == {"object": "reference.deleted", "name": "a", "deleted": True}
        for method in ("GET", "DELETE"):
            status, param, message = error_of(await client.request(method, "/v1/references/a"))
            assert (status, param, message) == (404, "name", "there is no reference 'a'")
        assert (await client.get("/v1/references")).json()["data"] == [second]
    assert {path.name for path in engine.directory.root.iterdir()} == {"b"}


async def test_a_reference_that_cannot_be_deleted_stays(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch):
    def refused(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    async with client_of(app_of(engine)) as client:
        recorded = await record(client)
        monkeypatch.setattr(Path, "rename", refused)
        status, param, message = error_of(await client.delete("/v1/references/base"))
        assert (status, param) == (507, "name")
        assert message.endswith("Permission denied")
        assert (await client.get("/v1/references/base")).json() == recorded


async def test_a_damaged_manifest_is_told(engine: ReferenceEngine):
    async with client_of(app_of(engine)) as client:
        await record(client)
        (engine.directory.root / "base" / "manifest.json").write_text('{"format_version": 7}')
        for answer in (await client.get("/v1/references/base"), await client.post("/v1/references", json=BODY)):
            status, param, message = error_of(answer)
            assert (status, param) == (409, "name")
            assert "manifest.json: it has format version 7" in message
        assert (await client.get("/v1/references")).json()["data"] == []


async def test_nan_of_the_model_ends_the_recording_and_is_not_kept(engine: ReferenceEngine):
    engine.nan_at = 2
    async with client_of(app := app_of(engine)) as client:
        status, _, message = error_of(await client.post("/v1/references", json=BODY))
        assert status == 500
        assert "position 3" in message
        assert is_idle(app)
        engine.nan_at = None
        assert (await record(client))["complete"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_disk_is_told(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch, stream: bool):
    monkeypatch.setattr(recorder, "SECONDS_TO_ASK", 0)
    write_shard = StoredReference.write_shard

    def full(reference: StoredReference, index: int, *tensors: Any) -> None:
        if index == 2:
            raise OSError(28, "No space left on device")
        write_shard(reference, index, *tensors)

    monkeypatch.setattr(StoredReference, "write_shard", full)
    async with client_of(app := app_of(engine)) as client:
        answer = await client.post("/v1/references", json={**BODY, "stream": stream})
        message = events(answer)[-1]["error"]["message"] if stream else error_of(answer)[2]
        assert "reference 'base' could not be written: [Errno 28] No space left on device" in message
        assert answer.status_code == (200 if stream else 507)
        assert is_idle(app)
        assert not (await client.get("/v1/references/base")).json()["complete"]
        monkeypatch.undo()
        assert (await record(client))["complete"]


async def test_a_disk_that_is_full_at_once(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", full)
    async with client_of(app_of(engine)) as client:
        status, param, message = error_of(await client.post("/v1/references", json=BODY))
    assert (status, param) == (507, "name")
    assert "No space left" in message
    assert not files(engine.directory.root)


async def test_two_who_record_the_same_get_the_same(engine: ReferenceEngine):
    async with client_of(app := app_of(engine)) as client:
        first, second = await asyncio.gather(record(client), record(client))
    assert first == second
    assert is_idle(app)


async def test_a_reference_that_is_deleted_while_it_is_recorded(engine: ReferenceEngine):
    engine.held.clear()
    async with client_of(app := app_of(engine)) as client:
        recording = asyncio.create_task(client.post("/v1/references", json=BODY))
        await engine.has_any.wait()
        await client.delete("/v1/references/base")
        await record_other(client, engine)
        status, _, message = error_of(await recording)
    assert status in (404, 409, 507)
    assert "base" in message
    assert is_idle(app)
    assert engine.directory.open("base").manifest.text.num_tokens == len(TOKENS) - 10


async def record_other(client: Any, engine: ReferenceEngine) -> None:
    engine.held.set()
    await record(client, prompt=TOKENS[10:])


async def test_windows_are_counted_in_as_they_are_begun(engine: ReferenceEngine):
    """No more than the engine has use for, so that other requests have room."""
    size = EngineSize(tokens=48, sequences=192, max_scoring_tokens=100)
    app = light_app(engine=engine, references=engine.references(), size=size)
    engine.held.clear()
    async with client_of(app) as client:
        recording = asyncio.create_task(client.post("/v1/references", json={**BODY, "stride": 1}))
        await engine.has_any.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        admission = app.state.scoremode.admission
        assert 3 * 16 <= admission.num_tokens <= 4 * 16
        engine.held.set()
        assert (await recording).status_code == 200
    assert is_idle(app)
