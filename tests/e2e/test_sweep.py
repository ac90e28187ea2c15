"""`ppl-client sweep` on real servers: its figures are those of `ppl-client kld` by hand, and a model that is added runs
alone.

Each model that is served takes half a minute to start. So the sweep serves one, and has the second by the URL of the
server that runs by hand are made on.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from local_server import CPU_ENVIRONMENT, CPU_FLAGS, has_gpu
from scoremode import ScoreClient
from tests import oracle
from tests.command_line import ppl_client, run_ppl_client
from tests.shared_servers import SERVERS, Servers
from tests.texts import WIKITEXT

TEXT = {"text_file": str(WIKITEXT), "max_tokens": 1000}
WINDOWS = {"method": "disjoint", "context_length": 64}
NUM_WINDOWS = 15


class Sweeps:
    """A plan that grows, and what the sweeps over it made."""

    def __init__(self, folder: Path, random_model: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._random_model = random_model

    def sweep(self, *more: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        plan = {
            "output": "runs",
            "text": TEXT,
            "windows": WINDOWS,
            "serve": [*SERVERS["server_by_hand"].flags, *(() if has_gpu() else CPU_FLAGS)],
            "env": {} if has_gpu() else CPU_ENVIRONMENT,
            "models": [
                {"name": "base", "model": str(self._random_model)},
                *more,
            ],
        }
        path = self.folder / "plan.yaml"
        path.write_text(yaml.safe_dump(plan))
        return run_ppl_client("sweep", str(path), "--quiet")

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.runs / f"{name}.json").read_text())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return load_file(self.runs / f"{name}.safetensors")

    def times(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.runs.glob("*.safetensors")}


@pytest.fixture(scope="module")
def server_by_hand(servers: Servers) -> str:
    return servers.url("server_by_hand")


@pytest.fixture(scope="module")
def sweeps(random_model: Path, servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    """After one sweep over one model. The server of another one, which has its references, may start meanwhile."""
    sweeps = Sweeps(tmp_path_factory.mktemp("sweep"), random_model)
    sweeps.runs.mkdir()
    (sweeps.runs / "references").symlink_to(servers.references("sweep"))
    done = sweeps.sweep()
    assert done.returncode == 0, done.stderr
    return sweeps


@pytest.fixture(scope="module")
def added(sweeps: Sweeps, server_by_hand: str) -> "subprocess.CompletedProcess[str]":
    """The sweep again, with a second model, and a third that cannot start."""
    before = sweeps.times()
    done = sweeps.sweep({"name": "missing", "model": "/no/such/model"}, {"name": "disturbed", "url": server_by_hand})
    assert {name: time for name, time in sweeps.times().items() if name in before} == before
    return done


def test_a_model_that_is_added_runs_alone_and_one_that_fails_is_reported(
    sweeps: Sweeps, added: "subprocess.CompletedProcess[str]"
):
    assert added.returncode == 1
    assert added.stderr.count("measured before") == 1
    assert "ppl-client: missing failed: the server ended with status" in added.stderr
    assert "/no/such/model" in (sweeps.runs / "logs" / "missing.log").read_text()
    assert "disturbed" in added.stdout


@pytest.mark.usefixtures("added")
def test_two_models_make_two_runs_and_a_report(sweeps: Sweeps):
    base, disturbed = sweeps.record("base"), sweeps.record("disturbed")
    assert (base["kind"], disturbed["kind"]) == ("perplexity", "kld")
    assert disturbed["statistics"]["kld"]["mean"] > 1e-3
    assert disturbed["statistics"]["num_windows"] == NUM_WINDOWS
    # The same positions, scored as prompts and from the reference's hidden states: sums in another order.
    oracle.assert_close(sweeps.arrays("disturbed")["reference_logprobs"], sweeps.arrays("base")["logprobs"])
    assert (sweeps.runs / "report.html").is_file()


@pytest.mark.usefixtures("added")
def test_the_figures_are_those_of_ppl_client_by_hand(sweeps: Sweeps, server_by_hand: str):
    swept, output = sweeps.record("disturbed"), sweeps.folder / "by-hand.json"
    name = swept["reference"]["name"]
    ppl_client("kld", "--url", server_by_hand, "--reference", name, "--output", str(output), "--quiet")
    arrays = load_file(output.with_suffix(".safetensors"))
    for each in ("token_ids", "window_sizes"):
        assert sweeps.arrays("disturbed")[each].tolist() == arrays[each].tolist()
    # Batches are put together otherwise in each run, and float32 sums depend on that.
    oracle.assert_close(sweeps.arrays("disturbed")["kld"], arrays["kld"])
    oracle.assert_close(sweeps.arrays("disturbed")["logprobs"], arrays["logprobs"])
    options = ["--text-file", str(WIKITEXT), "--max-tokens", "1000", "--method", "disjoint", "--context-length", "64"]
    ppl_client("--url", server_by_hand, *options, "--output", str(output), "--quiet")
    assert json.loads(output.read_text())["perplexity"] == pytest.approx(swept["statistics"]["ppl_q"], rel=1e-5)


def test_a_run_has_the_size_of_its_model_and_the_texts_of_its_tokens(
    sweeps: Sweeps, server_by_hand: str, random_model: Path
):
    record, file = sweeps.record("base"), random_model / "model.safetensors"
    assert record["server"]["weight_bytes"] == file.stat().st_size
    assert record["server"]["num_parameters"] == sum(tensor.size for tensor in load_file(file).values())
    token_ids = np.unique(sweeps.arrays("base")["token_ids"]).tolist()
    assert set(record["token_texts"]) == {str(token_id) for token_id in token_ids}
    with ScoreClient(server_by_hand) as client:
        assert client.token_texts(token_ids) == {int(key): text for key, text in record["token_texts"].items()}
        (score,) = client.score([token_ids[:50]], return_tokens=True)
    assert score.tokens == [record["token_texts"][str(token_id)] for token_id in token_ids[:50]]
