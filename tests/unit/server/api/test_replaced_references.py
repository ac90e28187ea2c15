"""References that are deleted, and recorded anew, while they are recorded."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

from scoremode_server.references.directory import StoredReference
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.api.reference_engine import BODY, TOKENS, ReferenceEngine, record

ANEW = {**BODY, "prompt": TOKENS[10:]}
REPLACED = (409, "name", "reference 'base' was deleted meanwhile, and another has its name now")


@pytest.mark.parametrize(
    ("is_anew", "expected"), [(True, REPLACED), (False, (404, "name", "there is no reference 'base'"))]
)
async def test_a_recording_ends_when_its_reference_is_deleted(tmp_path: Path, is_anew, expected):
    engine = ReferenceEngine(tmp_path)
    engine.let_go.clear()
    async with client_of(light_app(engine)) as client, client_of(light_app(ReferenceEngine(tmp_path))) as other:
        recording = asyncio.create_task(client.post(REFERENCES, json=BODY))
        await engine.has_any.wait()
        await other.delete(f"{REFERENCES}/base")
        if is_anew:
            await record(other, **ANEW)
        engine.let_go.set()
        assert error_of(await recording) == expected


async def test_no_file_of_a_reference_that_took_the_name_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root, read_shard = tmp_path / "here", StoredReference.read_shard
    async with client_of(light_app(ReferenceEngine(tmp_path / "there"))) as other:
        await record(other, **ANEW)

    def replaced_before(reference: StoredReference, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 3:
            shutil.rmtree(root / "base")
            shutil.copytree(tmp_path / "there" / "base", root / "base")
        return read_shard(reference, index)

    async with client_of(light_app(ReferenceEngine(root))) as client:
        await record(client)
        monkeypatch.setattr(StoredReference, "read_shard", replaced_before)
        assert error_of(await client.post(REFERENCES, json=BODY)) == REPLACED
    assert (root / "base" / "windows" / "000003.safetensors").exists()
