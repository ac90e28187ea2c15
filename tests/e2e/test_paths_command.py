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
FEW_ROWS = f"{planted_fault.VARIABLE}=single-rows:1:1.02"
ATTENTION = f"{planted_fault.VARIABLE}=attention:0:1.02"

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
            *("--try", "no-such-flag", "--fail-if", "differs", "--at-once", "2"),
            *(word for path in (ATTENTION, FEW_ROWS) for word in ("--try", path)),
            *("--", *SMALL, *(() if has_gpu() else CPU_FLAGS)),
        ]
        settings = environment if has_gpu() else environment | CPU_ENVIRONMENT
        self.ended = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True)
        self.rows = {row.name: row for row in read_run(folder / "runs" / "paths.json", PathsRun, "paths").rows}


@pytest.fixture(scope="module")
def paths(random_model, tmp_path_factory) -> Paths:
    return Paths(random_model, tmp_path_factory.mktemp("paths"))


def divergence(model: Path, layer: str) -> float:
    """The mean KL divergence of a model from itself with a layer's weight times 1.02, in float64."""
    tokens = AutoTokenizer.from_pretrained(model)(WIKITEXT.read_text()[:10_000])["input_ids"]
    windows = [tokens[start : start + CONTEXT] for start in range(0, NUM_WINDOWS * CONTEXT, CONTEXT)]
    faulty = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        faulty.get_submodule(layer).weight.mul_(1.02)
    return np.concatenate([window.kld for window in oracle.divergences(model, faulty, windows)]).mean()


def test_a_layers_fault_is_named_and_nothing_else(paths, random_model):
    row = paths.rows[ATTENTION]
    assert [(lane.lane, lane.differs) for lane in row.lanes] == [("prefill", True), ("decode", True)]
    assert [block.name for block in row.blocks] == ["model.layers.0.self_attn"]
    exact = divergence(random_model, "model.layers.0.self_attn.o_proj")
    means = [test.mean for test in (*(lane.excess for lane in row.lanes), row.blocks[0].excess)]
    assert means == pytest.approx([exact] * 3, rel=1e-3)
    assert paths.ended.returncode == LIMIT_EXCEEDED
    assert f"{ATTENTION} reports the same kernels as default." in paths.ended.stdout


def test_a_fault_of_steps_with_few_rows_is_found_in_decode_alone(paths, random_model):
    row = paths.rows[FEW_ROWS]
    assert [(lane.lane, lane.differs) for lane in row.lanes] == [("prefill", False), ("decode", True)]
    assert row.lanes[1].excess.mean == pytest.approx(divergence(random_model, "model.layers.1.mlp.down_proj"), rel=1e-3)
    assert row.blocks == []


def test_a_server_that_refuses_is_a_row(paths):
    assert paths.rows["no-such-flag"].verdict == "refused"
    assert "unrecognized arguments: --no-such-flag" in paths.rows["no-such-flag"].reason
