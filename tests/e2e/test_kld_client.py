"""`ppl-client record` and `kld` against real servers that share a folder of references."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from scoremode import NotFoundError, ScoreClient
from tests.command_line import ppl_client
from tests.texts import WIKITEXT

NAME = "command-line"
TEXT = ("--text-file", str(WIKITEXT), "--max-tokens", "384", "--method", "disjoint", "--context-length", "64")
NUM_WINDOWS = 5


def compared(server: str, folder: Path, *more: str) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """What a comparison printed, its record and its arrays."""
    output = folder / "run.json"
    printed = ppl_client(
        "kld", "--url", server, "--reference", NAME, "--output", str(output), "--force", "--quiet", *more
    )
    return printed, json.loads(output.read_text()), load_file(output.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def recorded(server: str) -> Iterator[str]:
    """What recording printed."""
    yield ppl_client("record", "--url", server, "--reference", NAME, *TEXT, "--quiet")
    with ScoreClient(server) as client:
        client.delete_reference(NAME)


def test_a_reference_is_recorded_once_with_its_texts_perplexity(server, recorded, tmp_path):
    output = tmp_path / "result.json"
    ppl_client("--url", server, *TEXT, "--output", str(output), "--quiet")
    with ScoreClient(server) as client:
        reference = client.reference(NAME)
    assert (reference.complete, reference.num_windows) == (True, NUM_WINDOWS)
    assert reference.perplexity == pytest.approx(json.loads(output.read_text())["perplexity"], rel=1e-5)
    assert f"recorded        {NUM_WINDOWS} windows" in recorded
    again = ppl_client("record", "--url", server, "--reference", NAME, *TEXT, "--quiet")
    assert f"recorded        {NUM_WINDOWS} windows, {NUM_WINDOWS} of them before" in again


def test_a_model_vs_itself_is_the_noise_floor(server, recorded, tmp_path):
    _, record, arrays = compared(server, tmp_path)
    assert np.abs(arrays["kld"]).max() < 1e-6
    assert record["statistics"]["same_top_p"] == 1
    assert arrays["window_sizes"].tolist() == [63] * NUM_WINDOWS
    printed, record, _ = compared(server, tmp_path, "--floor")
    assert "this comparison, kept with the reference" in printed
    assert record["reference"]["noise_floor"]["num_scored"] == 63 * NUM_WINDOWS


def test_every_figure_of_another_model_is_numpys_on_the_values(int8_server, recorded, tmp_path):
    printed, record, arrays = compared(int8_server, tmp_path)
    kld = arrays["kld"].astype(np.float64)
    assert kld.mean() > 1e-4
    stderr = kld.std(ddof=1) / np.sqrt(len(kld))
    assert f"Mean    KLD: {kld.mean():10.6f} ± {stderr:10.6f}" in printed
    for name, percent in {"p999": 99.9, "p99": 99, "median": 50, "p1": 1}.items():
        assert record["statistics"]["kld"][name] == pytest.approx(np.percentile(kld, percent), rel=1e-9)
    same = (arrays["top_token_ids"] == arrays["reference_top_token_ids"]).mean()
    assert record["statistics"]["same_top_p"] == pytest.approx(same)
    assert record["most_divergent"][0]["token"] is not None
    with ScoreClient(int8_server) as client:
        there = client.kld(NAME).statistics
    assert there["kld"]["mean"] == pytest.approx(kld.mean(), abs=1e-5)


def test_a_server_without_a_folder_names_the_flag(bos_client):
    calls = [
        bos_client.references,
        lambda: bos_client.reference(NAME),
        lambda: bos_client.delete_reference(NAME),
        lambda: bos_client.record_reference(NAME, [5, 6, 7]),
        lambda: bos_client.kld(NAME),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="--reference-dir"):
            call()
