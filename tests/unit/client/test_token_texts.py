"""The texts of tokens that a run keeps beside their ids."""

import json

import numpy as np
import pytest
from fake_references import KldServer
from fake_scoremode import copy_of, error, serve, token_text
from safetensors.numpy import load_file

from scoremode.cli import main

TEXT = "The quick brown fox jumps over the lazy dog."
TEXT_OPTIONS = ["--text", TEXT, "--method", "disjoint", "--context-length", "8"]
ID_ARRAYS = {"token_ids", "top_token_ids", "reference_top_token_ids"}


@pytest.fixture
def server():
    """A model beside a reference of another."""
    recording = KldServer()
    with serve(recording) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]) == 0
    return KldServer(recording.references, noise=0.5)


@pytest.mark.parametrize("options", [TEXT_OPTIONS, ["kld", "--reference", "base"]], ids=["perplexity", "kld"])
def test_every_token_of_the_arrays_has_its_text(options, server, tmp_path):
    output = tmp_path / "run.json"
    with serve(server) as url:
        assert main([*options, "--url", url, "--output", str(output), "--quiet"]) == 0
    arrays = load_file(output.with_suffix(".safetensors"))
    occurring = np.unique(np.concatenate([arrays[name] for name in ID_ARRAYS & arrays.keys()])).tolist()
    texts = json.loads(output.read_text())["token_texts"]
    assert texts == {str(token_id): token_text(token_id) for token_id in occurring}


@pytest.mark.parametrize("options", [TEXT_OPTIONS, ["kld", "--reference", "base"]], ids=["perplexity", "kld"])
def test_a_server_without_the_route_costs_the_texts_and_not_the_run(options, server, tmp_path, capsys):
    def older(request):
        return copy_of(error(404, "Not Found")) if request.url.path == "/v1/tokens" else server(request)

    output = tmp_path / "run.json"
    with serve(older) as url:
        assert main([*options, "--url", url, "--output", str(output), "--quiet"]) == 0
    record = json.loads(output.read_text())
    assert record["token_texts"] == {}
    assert record["statistics"]["ppl_q"] > 1
    assert "the run is kept without the texts of its tokens: Not Found" in capsys.readouterr().err


def test_a_run_without_output_asks_for_no_texts(server):
    with serve(server) as url:
        assert main(["kld", "--reference", "base", "--url", url, "--quiet"]) == 0
    assert "/v1/tokens" not in {path for _, path, _ in server.requests}
