"""Paths of one model over processes that stand in for servers: which are measured, and what is known of each."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import fake_server
import numpy as np
import pytest
from fake_server import ALLOWED, BOS, DECODE_NOISE, OWN_NOISE, TEXT, compare

from scoremode.cli.main import main
from scoremode.cli.paths import measure
from scoremode.comparison.paths import PathRow, PathsRun
from scoremode.errors import RunError
from scoremode.runs import read_run
from scoremode.sweep import PlanError, checked_plan
from scoremode.sweep.paths import _paths, measure_paths
from scoremode.sweep.plan import ModelEntry, VaryOptions

STAND_IN = [sys.executable, fake_server.__file__]
PLAN = {
    "output": "runs",
    "text": {"text": TEXT * 5},
    "windows": {"method": "disjoint", "context_length": 8},
    "command": STAND_IN,
    "models": [{"name": "bytes", "model": "noise=0"}],
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is ready much sooner than a server."""
    monkeypatch.setattr("scoremode.sweep.processes._POLL_SECONDS", 0.05)


async def measured(folder: Path, vary: dict[str, Any], **changes: Any) -> tuple[dict[str, PathRow], list[str]]:
    """The rows by name, and the names of the models that were measured now."""
    plan = checked_plan({**PLAN, "vary": {"repeats": 2, **vary}, **changes}, "a plan")
    run, result = await measure_paths(plan, folder)
    assert read_run(folder / "runs" / "paths.json", PathsRun, "paths") == run
    return {row.name: row for row in run.rows}, result.measured


def test_values_are_measured_alone_and_with_product_in_combinations():
    vary = {
        "flags": {"attention-backend": ["A", "B/1"], "eager": [True]},
        "env": {"X": ["1"]},
        "command": [["c", "serve"]],
    }
    model = ModelEntry(name="a", model="b", serve=["--own"], env={"X": "0", "Y": "2"})
    alone = [path.name for path in _paths(VaryOptions.model_validate(vary), model)]
    assert alone == ["attention-backend=A", "attention-backend=B_1", "eager", "X=1", "command=1"]
    *_, last = combined = _paths(VaryOptions.model_validate({**vary, "product": True}), model)
    assert len(combined) == 3 * 2 * 2 * 2 - 1, "all but the default path"
    assert (last.name, last.serve, last.env, last.command) == (
        "attention-backend=B_1, eager, X=1, command=1",
        ["--own", "--attention-backend", "B/1", "--eager"],
        {"X": "1", "Y": "2"},
        ["c", "serve"],
    )


@pytest.mark.processes
async def test_a_path_that_differs_is_named_with_its_blocks_and_an_equal_one_agrees(tmp_path: Path):
    vary = {"env": {OWN_NOISE: ["0.2"], "OTHER": ["1"]}, "command": [["no-such-program"]]}
    rows, names = await measured(tmp_path, vary)
    assert {name: row.verdict for name, row in rows.items()} == {
        "default": "default",
        f"{OWN_NOISE}=0.2": "differs",
        "OTHER=1": "agrees",
        "command=1": "refused",
    }
    assert "'no-such-program' not found" in (rows["command=1"].reason or "")
    assert names == ["default", "default-again", f"{OWN_NOISE}=0.2", "OTHER=1"]
    runs = {name: [*(tmp_path / "runs").glob(f"{name}*.json")] for name in ("default-again", "OTHER=1")}
    assert [len(files) for files in runs.values()] == [2, 2], "both in repeats, which are compared in pairs"
    (lane,) = (differing := rows[f"{OWN_NOISE}=0.2"]).lanes
    tokens = [BOS, *(TEXT * 5).encode()]
    windows = [compare(tokens[start : start + 8], 1, 0.2).kld for start in range(0, len(tokens) - 8, 8)]
    assert lane.excess.mean == pytest.approx(np.concatenate(windows).mean(), rel=1e-6)
    assert (lane.excess.floor, lane.differs_from) == (0, 1)
    assert differing.eager == lane.model_copy(update={"tokens_per_second": differing.eager.tokens_per_second})
    # The stand-in keeps 0.9, 0.8, 0.3, 0.3 and 0.1 of its noise after each boundary, and the divergence is its square.
    assert [block.name for block in differing.blocks] == [
        "model.layers.0.mlp",
        "embeddings",
        "model.layers.0.self_attn",
        "model.layers.1.mlp",
        "head",
    ]
    shares = [block.excess.mean / lane.excess.mean for block in differing.blocks]
    assert shares == pytest.approx([0.8**2 - 0.3**2, 1 - 0.9**2, 0.9**2 - 0.8**2, 0.3**2 - 0.1**2, 0.1**2], rel=0.05)
    assert (await measured(tmp_path, vary))[1] == [], "all is reused"


@pytest.mark.processes
async def test_no_path_is_served_if_the_default_path_fails(tmp_path: Path):
    with pytest.raises(RunError, match=r"the default path fails: the server ended with status 1 .*out of memory"):
        await measured(tmp_path, {"env": {"OTHER": ["1"]}}, models=[{"name": "bytes", "model": "broken"}])
    assert [log.stem for log in (tmp_path / "runs" / "logs").iterdir()] == ["default"]


async def test_two_runs_with_one_file_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"two runs would be written to x=1 \(2\)\.json"):
        await measured(tmp_path, {"env": {"X": ["1", "1 (2)"]}})


@pytest.mark.processes
def test_with_fail_if_a_refused_path_makes_the_command_fail(tmp_path: Path):
    plan = checked_plan({**PLAN, "vary": {"repeats": 2, "command": [["no-such-program"]]}}, "a plan")
    options = Namespace(quiet=True, api_key=None, at_once=None)
    assert [measure(plan, tmp_path, options, fail_if_differs=fail) for fail in (False, True)] == [0, 1]


@pytest.mark.processes
def test_a_fault_of_the_decode_lane_has_no_blocks(tmp_path: Path):
    """The command also writes the report of runs that are all of this lane."""
    plan = PLAN | {"lane": "decode", "vary": {"env": {DECODE_NOISE: ["0.2"]}}}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    assert main(["sweep", str(tmp_path / "plan.yaml"), "--quiet"]) == 0
    row = read_run(tmp_path / "runs" / "paths.json", PathsRun, "paths").rows[1]
    assert ([lane.lane for lane in row.lanes], row.verdict, row.eager) == (["decode"], "differs", None)
    assert row.name in (tmp_path / "runs" / "report.html").read_text()


@pytest.mark.processes
async def test_the_table_is_kept_if_the_default_path_fails_when_it_is_eager(tmp_path: Path):
    not_eager = 'case "$*" in *--enforce-eager*) echo MemoryError: all; exit 3;; esac; exec "$@"'
    rows, _ = await measured(tmp_path, {"env": {OWN_NOISE: ["0.2"]}}, command=["sh", "-c", not_eager, "sh", *STAND_IN])
    assert rows[f"{OWN_NOISE}=0.2"].verdict == "differs"
    assert "with both paths eager, the default path fails: the server" in rows[f"{OWN_NOISE}=0.2"].reason


@pytest.mark.processes
async def test_a_path_whose_server_dies_half_way_has_failed(tmp_path: Path):
    """The server ends at the last window of the decode lane. A window is compared before those of the first lane."""
    tokens = [BOS, *(TEXT * 5).encode()]
    (tmp_path / "allowed").write_text(str(1 + 2 * len(range(0, len(tokens) - 8, 8)) - 1))
    rows, _ = await measured(tmp_path, {"env": {ALLOWED: [str(tmp_path / "allowed")]}}, lane="both")
    (row,) = (row for name, row in rows.items() if name != "default")
    assert (row.verdict, [lane.lane for lane in row.lanes]) == ("failed", ["prefill"])
    assert "the server ended with status 7" in row.reason


@pytest.mark.processes
async def test_eager_servers_have_blocks_at_once_and_a_path_may_be_nearer_to_the_original(tmp_path: Path):
    """The original has no noise, the default path 0.3, one path less, and one more."""
    vary = {"env": {OWN_NOISE: ["0.1", "0.6"]}, "original": {"name": "original", "model": "noise=0"}}
    models = [{"name": "bytes", "model": "noise=0.3", "serve": ["--enforce-eager"]}]
    rows, _ = await measured(tmp_path, vary, models=models, text={**PLAN["text"], "max_tokens": 8192})
    original = rows[f"{OWN_NOISE}=0.1"].original
    assert original.high < 0
    assert np.isclose(original.mean / original.floor, (0.1 / 0.3) ** 2, rtol=0.1)
    assert rows[f"{OWN_NOISE}=0.6"].blocks
    assert not (tmp_path / "runs" / "eager").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vary": {}, "models": [{"name": "a", "url": "http://localhost:1"}]}, "vary needs exactly one model"),
        ({"vary": {"original": {"name": "a", "url": "http://localhost:1"}}}, "vary needs exactly one model"),
        ({"vary": {"flags": {"port": ["1"]}}}, "--port is set by the sweep"),
    ],
)
def test_vary_needs_one_model_that_the_sweep_serves(changes, message):
    with pytest.raises(PlanError, match=message):
        checked_plan({**PLAN, **changes}, "a plan")
