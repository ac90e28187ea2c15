"""`ppl-client` against a real server."""

import json

import pytest

from scoremode import NotFoundError
from scoremode.cli.main import main
from tests.texts import WIKITEXT


@pytest.mark.parametrize("method", ["sliding", "overlapping", "disjoint", "llama.cpp", "rolling"])
def test_windows_cut_here_and_on_the_server_give_the_same_number(server, client, tmp_path, method):
    options = ("--text-file", str(WIKITEXT), "--max-tokens", "600", "--context-length", "128", "--method", method)
    assert main(["--url", server, "--output", str(tmp_path / "result.json"), *options]) == 0
    here = json.loads((tmp_path / "result.json").read_text())
    there = client.perplexity(WIKITEXT.read_text(), method=method, max_tokens=600, context_length=128)
    for figure in ("perplexity", "nll_sum", "bits_per_byte", "word_perplexity", "perplexity_stderr"):
        assert here[figure] == pytest.approx(getattr(there, figure), rel=1e-6), figure
    assert here["num_scored"] == there.num_scored


def test_a_server_without_a_folder_names_the_flag(bos_client):
    with pytest.raises(NotFoundError, match="--reference-dir"):
        bos_client.kld("name")
