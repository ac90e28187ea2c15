"""`/v1/references`: resuming, also what another model or server began, refusing, listing, deleting, and races, on an
engine with real windows and files."""

import asyncio
import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.wire.protocol import ComputedBy
from scoremode_server.references import recording, service
from scoremode_server.references.files import tensors
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.files.manifest import _checksum
from tests.bad_inputs import KLD, REFERENCES
from tests.texts import DATA
from tests.unit.server.engine.fake_engine import until
from tests.unit.server.light_app import check_error, client_of, error_of, events, light_app
from tests.unit.server.references.reference_engine import (
    BODY,
    NUM_WINDOWS,
    TOKENS,
    ReferenceEngine,
    client_of_model,
    record,
)
from tests.unit.server.references.reference_setup import create, files, full_disk

BASE = f"{REFERENCES}/base"
STREAM = {**BODY, "stream": True}


async def test_a_reference_of_an_earlier_version_is_finished_and_compared_with(tmp_path, engine, client):
    """Three of seven windows were recorded before the first release; the figures are those that version gave."""
    shutil.copytree(DATA / "earlier/reference", tmp_path / "base")
    recorded = await record(client)
    assert sorted(engine.computed) == [3, 4, 5, 6]
    assert (recorded["created"], recorded["perplexity"]) == (1795753884, 39668.1613594358)
    async with client_of(light_app(ReferenceEngine(tmp_path, noise=0.1, fingerprint="of another"))) as other:
        figures = (await other.post(KLD, json={"reference": "base"})).json()["statistics"]
    assert figures["kld"]["mean"] == 0.038111667172446594
    assert figures["ln_ppl_ratio"] == 0.08707860364752301


async def test_a_recording_is_streamed_and_described(engine, client):
    *windows, recorded = events(await client.post(REFERENCES, json=STREAM))
    assert sorted(engine.computed) == list(range(NUM_WINDOWS))
    nlls: list[float] = []
    for index, progress in enumerate(windows):
        logprobs = engine.directory.open("base").read_shard(index)[1]
        nlls += (-logprobs).tolist()
        assert (progress["index"], progress["num_windows"]) == (index, NUM_WINDOWS)
        assert (progress["num_scored"], progress["total_scored"]) == (len(logprobs), len(nlls))
        assert progress["perplexity"] == pytest.approx(math.exp(np.mean(nlls)))
    assert (recorded["complete"], recorded["name"], recorded["model"]) == (True, "base", "a/model")
    assert len(windows) == recorded["num_windows"] == recorded["num_recorded"] == NUM_WINDOWS
    assert (recorded["num_scored"], recorded["num_tokens"], recorded["vocab_size"]) == (len(nlls), len(TOKENS), 1000)
    assert recorded["disk_bytes"] == sum(map(len, files(engine.directory.root).values()))
    assert math.log(recorded["perplexity"]) == pytest.approx(recorded["nll_mean"]) == pytest.approx(np.mean(nlls))


async def test_the_same_request_again_records_nothing(engine, client):
    first, second = await asyncio.gather(record(client), record(client))
    before = files(engine.directory.root)
    engine.computed.clear()
    assert [first] == [second] == events(await client.post(REFERENCES, json=STREAM))
    assert (engine.computed, files(engine.directory.root)) == ([], before)


@pytest.mark.parametrize("complete", [True, False])
async def test_missing_and_damaged_files_are_recorded_again(engine, client, complete):
    """The other windows stay as they are, and count in the progress."""
    whole = await record(client)
    before = files(engine.directory.root)
    reference = engine.directory.open("base")
    if not complete:
        reference.save(reference.manifest.model_copy(update={"result": None}))
    reference.shard(1).unlink()
    reference.shard(4).write_bytes(reference.shard(4).read_bytes()[:-1])
    (reference.path / "lm_head.safetensors").write_bytes(b"")
    found = (await client.get(BASE)).json()
    assert (found["complete"], found["num_recorded"]) == (complete, NUM_WINDOWS - 1)
    times = {path: path.stat().st_mtime_ns for path in reference.path.glob("windows/00000[0235]*")}
    engine.computed.clear()
    *windows, finished = events(await client.post(REFERENCES, json=STREAM))
    assert sorted(engine.computed) == [window["index"] for window in windows] == [1, 4]
    assert [window["total_scored"] for window in windows] == [15 + 8, 15 + 4 * 8]
    assert finished == whole
    assert files(engine.directory.root) == before
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.parametrize(
    ("changes", "identity", "message"),
    [
        *(({"prompt": TOKENS[:-1]}, {}, "another text"), ({"stride": 4}, {}, "other windows")),
        *(({"method": "overlapping"}, {}, "other windows"), ({}, {"fingerprint": "of another"}, "another model")),
        ({"labels": ["a"]}, {}, "other labels"),
    ],
)
async def test_other_content_under_the_same_name_is_refused(engine, client, changes, identity, message):
    await record(client)
    before = files(engine.directory.root)
    async with client_of_model(engine.directory.root, **identity) as other:
        answer = await other.post(REFERENCES, json={**BODY, **changes})
    check_error(answer, 409, "labels" if "labels" in changes else "name", message)
    assert files(engine.directory.root) == before


async def test_a_model_whose_logits_cannot_be_stored_is_refused(engine, client):
    engine.head = "its LM head is quantized (AWQ)"
    check_error(await client.post(REFERENCES, json=BODY), 400, "model", engine.head)
    assert not files(engine.directory.root)


async def test_references_are_listed_by_name_and_deleted(engine, client, monkeypatch):
    second, first = await record(client), await record(client, name="a")
    assert (await client.get(REFERENCES)).json() == {"object": "list", "data": [first, second]}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full_disk)
        assert error_of(await client.delete(BASE))[:2] == (507, "name")
    assert (await client.get(BASE)).json() == second
    assert (await client.delete(BASE)).json() == {"object": "reference.deleted", "name": "base", "deleted": True}
    for method in ("GET", "DELETE"):
        assert error_of(await client.request(method, BASE)) == (
            404,
            "name",
            "there is no reference 'base'; there are a",
        )
    assert (await client.get(REFERENCES)).json()["data"] == [first]
    assert os.listdir(engine.directory.root) == ["a"]


async def test_listing_reads_few_references_at_once(engine, client, monkeypatch):
    """Each has a thread of its own, so that one that does not answer holds up no other."""
    for index in range(3 * service.LISTED_AT_ONCE):
        create(engine.directory.root, f"base{index}")
    let_go, reading, most, describe = threading.Event(), set[int](), list[int](), StoredReference.described

    def described(reference: StoredReference) -> Any:
        reading.add(threading.get_ident())
        most.append(len(reading))
        assert let_go.wait(60)
        reading.discard(threading.get_ident())
        return describe(reference)

    monkeypatch.setattr(StoredReference, "described", described)
    listings = [asyncio.create_task(client.get(REFERENCES)) for _ in range(2)]
    await until(lambda: len(reading) == service.LISTED_AT_ONCE)
    let_go.set()
    for answer in await asyncio.gather(*listings):
        assert len(answer.json()["data"]) == 3 * service.LISTED_AT_ONCE
    assert max(most) == service.LISTED_AT_ONCE


async def test_a_damaged_manifest_is_reported_and_not_listed(engine, client):
    await record(client)
    (engine.directory.root / "base" / "manifest.json").write_text('{"format_version": 7}')
    for param, answer in (
        ("name", await client.get(BASE)),
        ("name", await client.post(REFERENCES, json=BODY)),
        ("name", await client.post(REFERENCES, json={**BODY, "layers": True})),
        ("reference", await client.post(KLD, json={"reference": "base"})),
    ):
        check_error(answer, 409, param, "manifest.json: it has form")
    assert (await client.get(REFERENCES)).json()["data"] == []


async def test_a_disk_that_is_full_ends_the_recording(engine, client, monkeypatch):
    """At the third window, then at the first file of another reference."""
    write_shard = StoredReference.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(StoredReference, "write_shard", lambda *of: (full_disk if of[1] == 2 else write_shard)(*of))
        error = events(await client.post(REFERENCES, json=STREAM))[-1]["error"]
    assert (error["code"], "No space left on device" in error["message"]) == (507, True)
    assert not (await client.get(BASE)).json()["complete"]
    assert (await record(client))["complete"]
    before = files(engine.directory.root)
    monkeypatch.setattr(tensors, "save_file", full_disk)
    assert error_of(await client.post(REFERENCES, json={**STREAM, "name": "b"}))[:2] == (507, "name")
    assert files(engine.directory.root) == before


CORPUS = {"name": "wikitext", "config": "raw", "split": "test", "num_rows": 4358, "sha256": "ab" * 32, "preset": "hf"}
KEPT = {**CORPUS, "max_windows": None, "by": None}


async def test_a_reference_keeps_what_was_said_first_and_one_of_before_is_read(engine, client):
    assert (await record(client, corpus=CORPUS))["corpus"] == KEPT
    assert (await record(client, corpus={**CORPUS, "name": "other"}))["corpus"] == KEPT
    path = engine.directory.open("base").path / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["corpus"], fields["checksum"]
    path.write_text(json.dumps({**fields, "checksum": _checksum(fields)}))
    assert (await client.get(f"{REFERENCES}/base")).json()["corpus"] is None
    assert (await record(client, corpus=CORPUS))["corpus"] == KEPT, "once it was given"
    unhashed = await client.post(REFERENCES, json={**BODY, "corpus": {"name": "wikitext"}})
    assert error_of(unhashed) == (400, "corpus", "corpus.sha256 is required")


async def test_windows_have_logprobs_and_ranks_where_they_are_asked_for(engine, client):
    *windows, _ = events(await client.post(REFERENCES, json={**BODY, "stream": True, "return_ranks": True}))
    *without, _ = events(await client.post(REFERENCES, json={**BODY, "stream": True, "name": "other"}))
    assert len(windows) == NUM_WINDOWS
    for index, window in enumerate(windows):
        assert window["logprobs"] == engine.directory.open("base").read_shard(index)[1].tolist()
        assert len(window["ranks"]) == window["num_scored"]
        assert all(rank >= 1 for rank in window["ranks"])
    assert not any({"logprobs", "ranks"} & window.keys() for window in without)


async def test_a_folder_that_cannot_be_written_to_is_told_without_its_path():
    """Not even by root."""
    async with client_of_model(Path("/proc/self/fdinfo")) as client:
        answer = await client.post(REFERENCES, json=BODY)
        check_error(answer, 507, "name", "reference 'base' could not be written: ")
        assert "/proc" not in answer.text
        assert (await client.get(REFERENCES)).json()["data"] == []


async def test_a_reference_says_what_recorded_it_and_other_gpus_are_logged(tmp_path: Path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(recording.logger, "warning", lambda text, *values: warnings.append(text % values))
    first, second = (ComputedBy(device=device, kernels=["UnquantizedLinearMethod"]) for device in ("A100", "H200"))
    sizes = {"stored_dtype": "bfloat16", "weight_bytes": 270, "num_parameters": 135}
    async with client_of_model(tmp_path, computed_by=first, **sizes) as client:
        recorded = await record(client)
        assert recorded["computed_by"] == first.model_dump()
        assert {name: recorded[name] for name in sizes} == sizes
        assert not warnings
    async with client_of_model(tmp_path, computed_by=second) as client:
        assert (await record(client))["computed_by"] == first.model_dump(), "it is that of most of its windows"
    [warning] = warnings
    assert ("A100" in warning, "H200" in warning) == (True, True)


ANEW = {**BODY, "prompt": TOKENS[10:]}
REPLACED = (404, "name", "reference 'base' was deleted meanwhile, and another has its name now")


@pytest.mark.parametrize(
    ("is_anew", "expected"), [(True, REPLACED), (False, (404, "name", "there is no reference 'base'"))]
)
async def test_a_recording_ends_when_its_reference_is_deleted(tmp_path: Path, is_anew, expected):
    engine = ReferenceEngine(tmp_path)
    engine.let_go.clear()
    async with client_of(light_app(engine)) as client, client_of_model(tmp_path) as other:
        recording = asyncio.create_task(client.post(REFERENCES, json=BODY))
        await until(engine.has_any.is_set)
        await other.delete(f"{REFERENCES}/base")
        if is_anew:
            await record(other, **ANEW)
        engine.let_go.set()
        assert error_of(await recording) == expected


async def test_no_file_of_a_reference_that_took_the_name_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root, read_shard = tmp_path / "here", StoredReference.read_shard
    async with client_of_model(tmp_path / "there") as other:
        await record(other, **ANEW)

    def replaced_before(reference: StoredReference, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 3:
            shutil.rmtree(root / "base")
            shutil.copytree(tmp_path / "there" / "base", root / "base")
        return read_shard(reference, index)

    async with client_of_model(root) as client:
        await record(client)
        monkeypatch.setattr(StoredReference, "read_shard", replaced_before)
        assert error_of(await client.post(REFERENCES, json=BODY)) == REPLACED
    assert (root / "base" / "windows" / "000003.safetensors").exists()
