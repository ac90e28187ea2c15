"""`ppl-client sweep` over a model that it serves and another whose server is running already, and `ppl-client compare`
over its runs."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from local_server import CPU_ENVIRONMENT, CPU_FLAGS, has_gpu
from scoremode import ScoreClient
from tests import oracle
from tests.command_line import ppl_client
from tests.shared_servers import TO_END, Servers
from tests.texts import WIKITEXT

NUM_WINDOWS = 15


@pytest.fixture(scope="module")
def runs(server: str, disturbed_model: Path, servers: Servers, tmp_path_factory: Any) -> Iterator[Path]:
    """The folder of two runs, whose references the running server has."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = folder / "runs"
    runs.mkdir()
    (runs / "references").symlink_to(servers.references("shared"))
    plan = {
        "output": "runs",
        "text": {"text_file": str(WIKITEXT), "max_tokens": 1000},
        "windows": {"method": "disjoint", "context_length": 64},
        "serve": [*TO_END.flags, *(() if has_gpu() else CPU_FLAGS)],
        "env": {} if has_gpu() else CPU_ENVIRONMENT,
        "models": [{"name": "base", "model": str(disturbed_model)}, {"name": "other", "url": server}],
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    ppl_client("sweep", str(folder / "plan.yaml"), "--quiet")
    yield runs
    with ScoreClient(server) as client:
        client.delete_reference(record(runs, "other")["reference"]["name"])


def record(runs: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((runs / f"{name}.json").read_text())
    return content


def test_two_models_make_two_runs_and_a_report(runs):
    base, other = record(runs, "base"), record(runs, "other")
    assert (base["kind"], other["kind"]) == ("perplexity", "kld")
    assert other["statistics"]["kld"]["mean"] > 1e-3
    assert other["statistics"]["num_windows"] == NUM_WINDOWS
    # The same positions, scored as prompts and from the reference's hidden states: sums in another order.
    compared, alone = (load_file(runs / f"{name}.safetensors") for name in ("other", "base"))
    oracle.assert_close(compared["reference_logprobs"], alone["logprobs"])
    assert (runs / "report.html").is_file()


def test_compare_has_the_figures_of_the_runs(runs):
    paths = [str(runs / f"{name}.json") for name in ("base", "other")]
    printed = ppl_client("compare", *paths, "--labels", "base,other", "--csv")
    rows = {(row["run"], row["beside"], row["figure"]): row for row in csv.DictReader(io.StringIO(printed))}
    base, other = (record(runs, name)["statistics"] for name in ("base", "other"))
    for label, statistics in (("base", base), ("other", other)):
        shown = rows[label, "", "perplexity"]
        # A run of perplexity has float32 in its arrays, from which this is computed anew.
        assert float(shown["value"]) == pytest.approx(statistics["ppl_q"], rel=1e-6)
        assert float(shown["stderr"]) == pytest.approx(statistics["ppl_q_stderr"], rel=1e-4)
    assert float(rows["other", "", "kld"]["value"]) == pytest.approx(other["kld"]["mean"], rel=1e-9)
    ratio = float(rows["other", "base", "ln_ppl_ratio"]["value"])
    assert ratio == pytest.approx(other["nll_q"] - base["nll_q"], abs=1e-6)
