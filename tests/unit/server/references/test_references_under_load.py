"""Several references at once, files that do not answer, and copies.

On an engine with a worker's own files and threads, but no model.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from scoremode_server.engine.admission import EngineSize, RequestQueue
from scoremode_server.references import comparer, recording, service
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.worker import lease, reads
from tests.bad_inputs import KLD, REFERENCES
from tests.unit.server.engine.fake_engine import until
from tests.unit.server.light_app import check_error, client_of, error_of, light_app
from tests.unit.server.references.reference_engine import (
    BODY,
    TOKENS,
    ReferenceEngine,
    client_of_model,
    record,
)

SECONDS = 60
"""Time limit for a test, which takes a second or two. If it takes more, an engine waits for something."""

SMALL = EngineSize(tokens=32, sequences=2, max_scoring_tokens=100_000)
"""Two windows at a time, so that the engine could change between references for each."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference waits for the time in which the one before it may send its first window."""
    monkeypatch.setattr(lease, "FIRST_SECONDS", 0.2)


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A folder with two references that have different heads."""
    for name, noise in (("base", 0.0), ("other", 0.5)):
        async with client_of_model(tmp_path, noise) as client:
            await record(client, name=name)
    return tmp_path


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = ReferenceEngine(root, 0.1, fingerprint="served")
    async with asyncio.timeout(SECONDS), client_of(light_app(engine, size=SMALL)) as client:
        yield client


async def kld(client: httpx.AsyncClient, name: str, index: int | None = None) -> httpx.Response:
    """The whole reference, or one window."""
    windows = {} if index is None else {"windows": [index, index + 1]}
    return await client.post(KLD, json={"reference": name, **windows})


async def scores(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/score", json={"prompt": TOKENS[:20]})).status_code == 200


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """A file whose readers wait. At the end it is as it was."""
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        # Let waiting readers read an empty file.
        os.close(os.open(path, os.O_RDWR))
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(writer)
        path.write_bytes(content)


async def test_a_request_that_has_begun_is_finished(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Its last windows wait, since another reference is let in before them."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0)
    monkeypatch.setattr(comparer, "SECONDS_TO_WAIT", 0.2)
    engine = ReferenceEngine(root, 0.1, fingerprint="served")
    engine.let_go.clear()
    async with asyncio.timeout(SECONDS), client_of(light_app(engine, size=SMALL)) as client:
        whole = asyncio.create_task(kld(client, "base"))
        await until(engine.has_any.is_set)
        refused = await kld(client, "other", 0)
        check_error(refused, 429, "reference", "with other references for 0.2 s: try again later")
        assert refused.headers["Retry-After"] == "1"
        engine.let_go.set()
        assert (await whole).json()["statistics"]["num_scored"] == len(TOKENS) - 1


@pytest.mark.parametrize("name", ["windows/000002.safetensors", "lm_head.safetensors"])
async def test_a_file_that_does_not_answer_holds_up_comparisons_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(reads, "SECONDS_TO_READ", 3)
    async with serving(root) as client:
        with hanging(root / "base" / name):
            # More than a reference has threads.
            waiting = [asyncio.create_task(kld(client, "base", 2)) for _ in range(10)]
            await asyncio.sleep(0)
            await scores(client)
            # A window that waits for a file does not use the engine.
            assert (await kld(client, "other")).status_code == 200
            assert not any(each.done() for each in waiting)
            for answer in await asyncio.gather(*waiting):
                check_error(answer, 503, "reference", "was not read within 3 s")
            assert (await kld(client, "other")).status_code == 200
        assert (await kld(client, "base")).status_code == 200


async def test_a_manifest_that_does_not_answer_holds_up_its_reference_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "SECONDS_TO_ANSWER", 5)
    monkeypatch.setattr(service, "SECONDS_TO_LIST", 2)
    async with serving(root) as client:
        with hanging(root / "base" / "manifest.json"):
            # More than the event loop has threads.
            waiting = [asyncio.create_task(kld(client, "base")) for _ in range(64)]
            await asyncio.sleep(0)
            assert (await kld(client, "other")).status_code == 200
            listed = (await client.get(REFERENCES)).json()["data"]
            assert [reference["name"] for reference in listed] == ["other"]
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {503}


async def test_a_disk_that_does_not_answer_holds_up_its_reference_alone(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "SECONDS_TO_WRITE", 5)
    let_go, write_shard = Event(), StoredReference.write_shard

    def hang(reference: StoredReference, *arguments: Any) -> None:
        if reference.name == "hangs":
            let_go.wait()
        write_shard(reference, *arguments)

    monkeypatch.setattr(StoredReference, "write_shard", hang)
    async with serving(root) as client:
        # Fifty-odd windows, more than there ever were places for.
        stuck = asyncio.create_task(client.post(REFERENCES, json={**BODY, "name": "hangs", "stride": 1}))
        await asyncio.sleep(0)
        await scores(client)
        assert (await record(client, name="answers"))["complete"]
        assert not stuck.done()
        check_error(await stuck, 507, "name", "is not on disk after 5 s")
        let_go.set()


async def test_few_windows_of_a_recording_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers hold the hidden states of windows that are not on disk. The engine could take all of them at once."""
    held, add = [], RequestQueue.add

    def noted(queue: RequestQueue, *numbers: int) -> None:
        add(queue, *numbers)
        held.append(queue.num_tokens)

    monkeypatch.setattr(RequestQueue, "add", noted)
    size = EngineSize(tokens=32, sequences=1000, max_scoring_tokens=100_000)
    async with client_of(light_app(ReferenceEngine(tmp_path), size=size)) as client:
        assert (await record(client, stride=1))["num_windows"] > 20
    # One window may exceed two loads of the engine.
    assert 2 * size.tokens < max(held) <= 2 * size.tokens + BODY["context_length"]


async def test_copies_are_references_of_their_own(root: Path):
    """A worker does not take one for the other, whichever it has seen first."""
    shutil.copytree(root / "base", root / "copy")
    async with serving(root) as client:
        first = (await kld(client, "base")).json()["data"]
        assert (await kld(client, "copy")).json()["data"] == first
        await client.delete(f"{REFERENCES}/base")
        assert (await kld(client, "copy")).json()["data"] == first
        (root / "copy").rename(root / "moved")
        assert (await kld(client, "moved")).json()["data"] == first
        assert error_of(await kld(client, "copy"))[0] == 404


def flip_a_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("name", ["windows/000003.safetensors", "lm_head.safetensors"])
async def test_damage_of_a_copy_is_an_error_whatever_was_read_before(root: Path, name: str):
    shutil.copytree(root / "base", root / "copy")
    async with serving(root) as client:
        assert (await kld(client, "base")).status_code == 200
        flip_a_bit(root / "copy" / name)
        message = f"reference 'copy' cannot be read: {name} was changed: its checksum does not match"
        assert error_of(await kld(client, "copy")) == (409, "reference", message)
        assert (await kld(client, "base")).status_code == 200
        flip_a_bit(root / "copy" / name)
        assert (await kld(client, "copy")).status_code == 200


@pytest.mark.parametrize("forget", [lambda root: shutil.rmtree(root / "base"), lambda root: None])
async def test_nothing_is_kept_of_what_was_read(root: Path, forget: Callable[[Path], None]):
    """Once nobody asks for it any more."""
    engine = ReferenceEngine(root)
    app = light_app(engine)
    async with client_of(app) as client:
        await asyncio.gather(*(kld(client, name, index) for index in range(4) for name in ("base", "other")))
        forget(root)
        await kld(client, "base", 5)
        files = app.state.scoremode_references.comparer.files
        await files._task
    assert not len(engine.windows.reads)
    assert not engine.windows.reads.threads._waiting
    assert not engine.windows.lease.is_used
