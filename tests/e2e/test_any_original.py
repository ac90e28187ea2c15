"""References that the transformers library records of the served model, and of a trainer's copy with a fault, on a real
server in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scoremode.cli.main import main
from scoremode.errors import ScoremodeError
from scoremode.wire.references import ReferenceRequest
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.from_transformers import identity_of, record

CUT: dict[str, Any] = {"method": "disjoint", "context_length": 128, "max_tokens": 4 * 128 + 1, "layers": True}
FAULTY = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def text(wikitext: str) -> str:
    return wikitext[9000:14_000]


def recorded(random_model: Path, root: Path, name: str, text: str, factor: float = 1.0) -> StoredReference:
    """The served model, with a weight of one block times a factor."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(random_model), AutoTokenizer.from_pretrained(random_model)
    model.get_submodule(FAULTY).o_proj.weight.data *= factor
    identity = identity_of(model, tokenizer, str(random_model)) if factor == 1 else None
    return record(model, tokenizer, root, ReferenceRequest(name=name, prompt=text, **CUT), identity=identity)


@pytest.fixture(scope="module")
def root(server, servers) -> Path:
    return servers.references("shared")


@pytest.fixture(scope="module")
def original(client, root, random_model, text) -> StoredReference:
    yield recorded(random_model, root, "original", text)
    client.delete_reference("original")


def test_the_served_model_is_that_of_transformers(client, root, original, text):
    client.record_reference("served", text, **CUT)
    served = ReferenceDirectory(root).open("served")
    own, other = original.manifest, served.manifest
    assert own.text == other.text
    assert own.head == other.head
    assert own.layers.blocks == other.layers.blocks
    assert (own.model.fingerprint, own.model.num_parameters) == (other.model.fingerprint, other.model.num_parameters)
    assert client.kld("original").statistics["kld"]["max"] < 1e-4
    for index in range(4):
        for boundary in served.boundaries:
            theirs = served.read_stream(index, boundary).double()
            distances = (original.read_stream(index, boundary) - theirs).norm(dim=1) / theirs.norm(dim=1)
            assert distances.max() < 1e-5
    client.delete_reference("served")


def test_its_server_measures_the_floor_of_a_reference_and_does_not_resume_it(server, client, original, text, capsys):
    assert main(["kld", "--url", server, "--reference", "original", "--floor", "--quiet"]) == 0
    assert "not quantized, float32, computed by transformers 5" in capsys.readouterr().out
    assert 0 < client.reference("original").noise_floor.mean < 1e-6
    with pytest.raises(ScoremodeError, match=r"recorded with transformers 5.*, and this is vLLM 0"):
        client.record_reference("original", text, **CUT)


def test_the_faulty_block_of_a_trainer_is_named(server, client, root, random_model, text, tmp_path):
    reference = recorded(random_model, root, "trainer", text, 1.02)
    assert reference.manifest.model.fingerprint.startswith("v2-tensors-")
    output = tmp_path / "layers.json"
    assert main(["layers", "--url", server, "--reference", "trainer", "--output", str(output), "--quiet"]) == 0
    layers = json.loads(output.read_text())
    costs = {part["name"]: part["cost"] for part in (layers["embeddings"], *layers["blocks"], layers["head"])}
    assert costs.pop(FAULTY) == pytest.approx(layers["whole"]["cost"], rel=1e-3)
    assert layers["whole"]["cost"] > 1e-6
    assert max(map(abs, costs.values())) < 1e-9
    client.delete_reference("trainer")
