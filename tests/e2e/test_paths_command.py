"""`ppl-client paths` over servers of one model, some of which have a fault that `tests/planted_fault.py` plants."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from local_server import CPU_ENVIRONMENT, CPU_FLAGS, has_gpu
from scoremode.cli.compare import LIMIT_EXCEEDED
from scoremode.comparison.paths import PathsRun
from scoremode.runs import read_run
from tests import oracle, planted_fault
from tests.shared_servers import SMALL
from tests.texts import WIKITEXT

CONTEXT, NUM_WINDOWS = 128, 8
FAULTS = f"{planted_fault.VARIABLE}=attention:0:1.02+single-rows:1:1.02"

# All tests need the same servers.
pytestmark = pytest.mark.xdist_group("paths")


class Paths:
    """The command, and the rows of its table."""

    def __init__(self, model: Path, folder: Path) -> None:
        packages = planted_fault.install(folder / "site"), os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, packages)))}
        command = [
            *(sys.executable, "-m", "scoremode.cli", "paths", model, "--text-file", WIKITEXT, "--quiet"),
            *("--context-length", str(CONTEXT), "--max-windows", str(NUM_WINDOWS), "--output", folder / "runs"),
            *("--try", "no-such-flag", "--fail-if", "differs", "--at-once", "2", "--repeats", "2", "--try", FAULTS),
            *("--", *SMALL, *(() if has_gpu() else CPU_FLAGS)),
        ]
        settings = environment if has_gpu() else environment | CPU_ENVIRONMENT
        self.ended = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True)
        self.rows = {row.name: row for row in read_run(folder / "runs" / "paths.json", PathsRun, "paths").rows}


@pytest.fixture(scope="module")
def paths(random_model, tmp_path_factory) -> Paths:
    return Paths(random_model, tmp_path_factory.mktemp("paths"))


def divergence(model: Path, *layers: str) -> float:
    """The mean KL divergence of a model from itself with the weights of layers times 1.02, in float64."""
    tokens = AutoTokenizer.from_pretrained(model)(WIKITEXT.read_text()[:10_000])["input_ids"]
    windows = [tokens[start : start + CONTEXT] for start in range(0, NUM_WINDOWS * CONTEXT, CONTEXT)]
    faulty = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        for layer in layers:
            faulty.get_submodule(layer).weight.mul_(1.02)
    return np.concatenate([window.kld for window in oracle.divergences(model, faulty, windows)]).mean()


def test_each_lane_has_its_faults_and_that_of_a_layer_is_named(paths, random_model):
    """One is in every step, and one in steps with few rows, which only the decode lane has."""
    row = paths.rows[FAULTS]
    assert [(lane.lane, lane.differs) for lane in row.lanes] == [("prefill", True), ("decode", True)]
    assert [block.name for block in row.blocks] == ["model.layers.0.self_attn"]
    prefill, decode = (lane.excess.mean for lane in row.lanes)
    exact = divergence(random_model, "model.layers.0.self_attn.o_proj")
    assert [prefill, row.blocks[0].excess.mean] == pytest.approx([exact] * 2, rel=1e-3)
    both = divergence(random_model, "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")
    assert decode == pytest.approx(both, rel=1e-3)
    assert both > 1.1 * exact
    assert paths.ended.returncode == LIMIT_EXCEEDED
    assert f"{FAULTS} reports the same kernels as default." in paths.ended.stdout


def test_a_server_that_refuses_is_a_row(paths):
    assert paths.rows["no-such-flag"].verdict == "refused"
    assert "unrecognized arguments: --no-such-flag" in paths.rows["no-such-flag"].reason
