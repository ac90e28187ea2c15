"""`ppl-client compare` over runs that real servers gave: a model and its INT8 copy."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoremode import ScoreClient
from tests.command_line import ppl_client
from tests.texts import WIKITEXT

NAME = "to-compare"
TEXT = ("--text-file", str(WIKITEXT), "--max-tokens", "640", "--method", "disjoint", "--context-length", "64")


@pytest.fixture(scope="module")
def runs(server: str, int8_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("runs")
    paths = [folder / "perplexity.json", folder / "base.json", folder / "int8.json"]
    ppl_client("--url", server, *TEXT, "--output", str(paths[0]), "--quiet")
    ppl_client("record", "--url", server, "--reference", NAME, *TEXT, "--quiet")
    for url, path in zip((server, int8_server), paths[1:], strict=True):
        ppl_client("kld", "--url", url, "--reference", NAME, "--output", str(path), "--quiet")
    yield paths
    with ScoreClient(server) as client:
        client.delete_reference(NAME)


def test_the_figures_are_those_of_the_runs(runs: list[Path]):
    printed = ppl_client("compare", *map(str, runs), "--labels", "perplexity,base,int8", "--csv")
    rows = {(row["run"], row["beside"], row["figure"]): row for row in csv.DictReader(io.StringIO(printed))}
    records = {path.stem: json.loads(path.read_text())["statistics"] for path in runs}
    for label, statistics in records.items():
        perplexity = rows[label, "", "perplexity"]
        # float32 in the arrays of a run of perplexity, from which this is computed anew.
        assert float(perplexity["value"]) == pytest.approx(statistics["ppl_q"], rel=1e-6)
        assert float(perplexity["stderr"]) == pytest.approx(statistics["ppl_q_stderr"], rel=1e-4)
    assert float(rows["int8", "", "kld"]["value"]) == pytest.approx(records["int8"]["kld"]["mean"], rel=1e-9)
    assert float(rows["int8", "base", "ln_ppl_ratio"]["value"]) == pytest.approx(
        records["int8"]["nll_q"] - records["base"]["nll_q"], abs=1e-9
    )
    assert rows["int8", "base", "kld_difference"]["verdict"] == "worse"


def test_the_same_model_measured_in_two_ways_differs_by_noise(runs: list[Path]):
    printed = ppl_client("compare", *map(str, runs[:2]), "--labels", "one,other", "--csv")
    [ratio] = [row for row in csv.DictReader(io.StringIO(printed)) if row["figure"] == "ln_ppl_ratio"]
    assert float(ratio["value"]) == pytest.approx(0, abs=1e-5)
