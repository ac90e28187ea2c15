"""`ppl-client record --layers` and `ppl-client layers`, on a server of the tiny model and one of its INT8 copy."""

import json
from pathlib import Path

import pytest
from quantized_oracle import oracle_model
from safetensors.numpy import load_file

from scoremode.cli.main import main
from tests import oracle

NUM_WINDOWS, CONTEXT = 4, 128


@pytest.fixture(scope="module")
def run(client, server, int8_server, wikitext, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    (folder / "text.txt").write_text(wikitext[9000:14_000])
    text = (
        "--text-file",
        str(folder / "text.txt"),
        "--max-tokens",
        str(NUM_WINDOWS * CONTEXT + 1),
        "--context-length",
        str(CONTEXT),
    )
    assert main(["record", "--url", server, *text, "--reference", "layers", "--layers", "--quiet"]) == 0
    output = folder / "layers.json"
    assert main(["layers", "--url", int8_server, "--reference", "layers", "--output", str(output), "--quiet"]) == 0
    yield output
    client.delete_reference("layers")


def test_the_quantized_layer_and_head_have_the_whole_cost(run):
    record = json.loads(run.read_text())
    assert record["floor"] == [0.0] * 5
    names = [f"model.layers.{index}.{name}" for index in (0, 1) for name in ("self_attn", "mlp")]
    assert [block["name"] for block in record["blocks"]] == names
    costs = [part["cost"] for part in (record["embeddings"], *record["blocks"], record["head"])]
    assert sum(costs) == pytest.approx(record["whole"]["cost"], rel=1e-9)
    # Both blocks of its last layer and its head are INT8.
    assert costs[:3] == pytest.approx([0, 0, 0], abs=1e-7)
    assert min(costs[3:]) > 1e-5


def test_a_windows_divergence_from_each_boundary_is_that_of_int8_arithmetic(
    run, client, random_model, int8_random_model
):
    sums = load_file(run.with_suffix(".safetensors"))["kld_sums"]
    assert sums.shape == (NUM_WINDOWS, 6)
    tokens = client.tokenize((run.parent / "text.txt").read_text())[:CONTEXT]
    base = oracle._float64_model(random_model)
    exact = oracle.resumed_divergences(base, oracle_model(int8_random_model, dtype=base.dtype), tokens)
    # Single activations fall on either side of the edge between two integers.
    assert sums[0, 1:] == pytest.approx(exact.sum(1), rel=0.05, abs=1e-6)
