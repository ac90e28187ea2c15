"""Where a reference's text is from, which the client says that records it."""

import json

from scoremode_server.references.manifest import _checksum
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.api.reference_engine import BODY, ReferenceEngine, record

CORPUS = {"name": "wikitext", "config": "raw", "split": "test", "num_rows": 4358, "sha256": "ab" * 32, "preset": "hf"}


async def test_a_reference_keeps_what_was_said_first_and_one_of_before_is_read(tmp_path):
    engine = ReferenceEngine(tmp_path)
    async with client_of(light_app(engine)) as client:
        assert (await record(client, corpus=CORPUS))["corpus"] == CORPUS
        assert (await record(client, corpus={**CORPUS, "name": "other"}))["corpus"] == CORPUS
        path = engine.directory.open("base").path / "manifest.json"
        fields = json.loads(path.read_text())
        del fields["corpus"], fields["checksum"]
        path.write_text(json.dumps({**fields, "checksum": _checksum(fields)}))
        assert (await client.get(f"{REFERENCES}/base")).json()["corpus"] is None
        assert (await record(client, corpus=CORPUS))["corpus"] == CORPUS, "now that it is said"
        unhashed = await client.post(REFERENCES, json={**BODY, "corpus": {"name": "wikitext"}})
    assert error_of(unhashed) == (400, "corpus", "corpus.sha256 is required")
