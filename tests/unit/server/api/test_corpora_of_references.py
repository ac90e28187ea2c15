"""Where a reference's text is from, which the client says that records it."""

import json

import pytest

from scoremode_server.references.manifest import FORMAT_VERSION, Manifest, _checksum
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.api.reference_engine import BODY, ReferenceEngine, record

CORPUS = {"name": "wikitext", "config": "raw", "split": "test", "num_rows": 4358, "sha256": "ab" * 32, "preset": "hf"}


@pytest.fixture
def engine(tmp_path):
    return ReferenceEngine(tmp_path)


@pytest.mark.parametrize("before", [CORPUS, None])
async def test_a_reference_keeps_what_was_said_first(engine, before):
    async with client_of(light_app(engine)) as client:
        assert (await record(client, corpus=before))["corpus"] == before
        assert (await record(client, corpus={**CORPUS, "name": "other"}))["corpus"]["name"] == (
            "other" if before is None else "wikitext"
        )
        assert (await client.get(f"{REFERENCES}/base")).json()["corpus"] is not None


async def test_a_manifest_of_before_is_read(engine):
    async with client_of(light_app(engine)) as client:
        await record(client, corpus=CORPUS)
        path = engine.directory.open("base").path / "manifest.json"
        fields = json.loads(path.read_text())
        del fields["corpus"], fields["checksum"]
        path.write_text(json.dumps({**fields, "checksum": _checksum(fields)}))
        assert fields["format_version"] == FORMAT_VERSION == Manifest.model_fields["format_version"].default
        assert (await client.get(f"{REFERENCES}/base")).json()["corpus"] is None


async def test_a_corpus_without_a_hash_is_refused(engine):
    async with client_of(light_app(engine)) as client:
        answer = await client.post(REFERENCES, json={**BODY, "corpus": {"name": "wikitext"}})
    assert error_of(answer) == (400, "corpus", "corpus.sha256 is required")
