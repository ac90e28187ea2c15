"""`ppl-client record` and `kld` against real servers that share a folder of references."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from scoremode import NotFoundError, ScoreClient
from tests.command_line import ppl_client
from tests.e2e.gate import gated
from tests.texts import WIKITEXT

NAME = "command-line"
TEXT = ("--text-file", str(WIKITEXT), "--max-tokens", "384", "--method", "disjoint", "--context-length", "64")
NUM_WINDOWS = 5


def compared(server: str, folder: Path, *more: str) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """What a comparison printed, its record and its arrays."""
    output = folder / "run.json"
    printed = ppl_client("kld", "--url", server, "--reference", NAME, "--output", str(output), "--quiet", *more)
    return printed, json.loads(output.read_text()), load_file(output.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def recorded(server: str) -> Iterator[str]:
    """What recording printed."""
    yield ppl_client("record", "--url", server, "--reference", NAME, *TEXT, "--quiet")
    with ScoreClient(server) as client:
        client.delete_reference(NAME)


def test_a_reference_is_recorded_once_and_its_perplexity_is_the_texts(server: str, recorded: str, tmp_path: Path):
    output = tmp_path / "result.json"
    ppl_client("--url", server, *TEXT, "--output", str(output), "--quiet")
    with ScoreClient(server) as client:
        reference = client.reference(NAME)
    assert (reference.complete, reference.num_windows) == (True, NUM_WINDOWS)
    assert reference.perplexity == pytest.approx(json.loads(output.read_text())["perplexity"], rel=1e-5)
    assert f"recorded        {NUM_WINDOWS} windows" in recorded
    again = ppl_client("record", "--url", server, "--reference", NAME, *TEXT, "--quiet")
    assert f"recorded        {NUM_WINDOWS} windows, {NUM_WINDOWS} of them before" in again


def test_a_model_beside_itself_diverges_nowhere_and_is_the_floor(server: str, recorded: str, tmp_path: Path):
    _, record, arrays = compared(server, tmp_path)
    assert np.abs(arrays["kld"]).max() < 1e-6
    assert record["statistics"]["same_top_p"] == 1
    assert arrays["window_sizes"].tolist() == [63] * NUM_WINDOWS
    printed, record, _ = compared(server, tmp_path, "--floor")
    assert "this comparison, kept with the reference" in printed
    assert record["reference"]["noise_floor"]["num_scored"] == 63 * NUM_WINDOWS


def test_every_figure_of_another_model_is_numpys_on_the_values(int8_server: str, recorded: str, tmp_path: Path):
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


def test_a_comparison_that_is_killed_goes_on(int8_server: str, recorded: str, tmp_path: Path):
    output, journal = tmp_path / "run.json", tmp_path / "run.json.journal"
    with gated(int8_server, "/v1/kld", 3) as url:
        options = ["kld", "--url", url, "--reference", NAME, "--output", str(output), "--concurrency", "1", "--quiet"]
        with subprocess.Popen([sys.executable, "-m", "scoremode.cli", *options]) as client:
            while not journal.exists() or journal.read_bytes().count(b"\n") < 1 + 3:
                assert client.poll() is None
                time.sleep(0.01)
            client.kill()
    before = journal.read_bytes().splitlines()
    assert len(before) == 1 + 3
    _, record, arrays = compared(int8_server, tmp_path, "--resume")
    assert record["statistics"]["num_windows"] == NUM_WINDOWS
    starts = np.cumsum([0, *arrays["window_sizes"]])
    for line in map(json.loads, before[1:]):
        index = line["index"]
        kept = arrays["kld"][starts[index] : starts[index + 1]]
        assert kept.tobytes() == base64.b64decode(line["positions"]["kld"]), "byte for byte"


def test_a_server_without_a_folder_says_how_to_get_one(bos_client: ScoreClient):
    calls: list[Callable[[], object]] = [
        bos_client.references,
        lambda: bos_client.reference(NAME),
        lambda: bos_client.delete_reference(NAME),
        lambda: bos_client.record_reference(NAME, [5, 6, 7]),
        lambda: bos_client.kld(NAME),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="--reference-dir"):
            call()
