"""Sweeps over processes that stand in for servers: what is measured, what is kept, and what a failure costs."""

import asyncio
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_references import KldServer
from fake_scoremode import BOS, logprob, serve
from safetensors.numpy import load_file
from stand_in_server import ALLOWED

from scoremode import measure_kld
from scoremode.client import AsyncScoreClient
from scoremode.sweep import SweepPlan, SweepResult, run_sweep

pytestmark = pytest.mark.processes

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in_server.py"))]
TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!"
NUM_WINDOWS = 10
BASE, NEAR, FAR = (
    {"name": name, "model": f"noise={noise}"} for name, noise in [("base", 0), ("near", 0.2), ("far", 1)]
)


def plan_of(*models: dict[str, Any], **changes: Any) -> SweepPlan:
    return SweepPlan.model_validate(
        {
            "output": "runs",
            "text": {"text": TEXT},
            "windows": {"method": "disjoint", "context_length": 8},
            "models": list(models),
            "command": STAND_IN,
            **changes,
        }
    )


async def sweep(folder: Path, *models: dict[str, Any], **changes: Any) -> SweepResult:
    return await run_sweep(plan_of(*models, **changes), folder)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is ready much sooner than a server."""
    monkeypatch.setattr("scoremode.sweep.server._POLL_SECONDS", 0.05)


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    asyncio.run(sweep(folder, BASE, NEAR))
    return folder


@pytest.fixture
def swept(swept_once: Path, tmp_path: Path) -> Path:
    """A folder after a sweep over BASE and NEAR."""
    return Path(shutil.copytree(swept_once, tmp_path / "swept"))


def record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / f"{name}.json").read_text())


def log(folder: Path, name: str) -> str:
    """Has methods and paths of the requests that a model's server had when it was last started."""
    return (folder / "runs" / "logs" / f"{name}.log").read_text()


def running_commands() -> list[str]:
    """Of all processes that can be looked at."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_text(errors="replace"))
    return commands


async def test_the_first_gets_its_perplexity_and_each_other_its_divergence_from_it(tmp_path: Path):
    result = await sweep(tmp_path, BASE, NEAR, FAR)
    assert result.failures == {}
    assert result.measured == list(result.runs) == ["base", "near", "far"]
    base, near, far = (record(tmp_path, name) for name in result.runs)
    assert (base["kind"], near["kind"], far["kind"]) == ("perplexity", "kld", "kld")
    tokens = [BOS, *TEXT.encode()]
    windows = [tokens[start : start + 8] for start in range(0, 80, 8)]
    nlls = [-logprob(window, position) for window in windows for position in range(1, 8)]
    assert base["statistics"]["nll_q"] == pytest.approx(sum(nlls) / len(nlls))
    assert 0 < near["statistics"]["kld"]["mean"] < far["statistics"]["kld"]["mean"]
    assert len(load_file(tmp_path / "runs" / "near.safetensors")["kld"]) == 70
    assert base["token_texts"][str(ord("T"))] == "T"


async def test_the_figures_are_those_of_kld_by_hand(swept: Path):
    near = record(swept, "near")
    server = KldServer()
    async with AsyncScoreClient("http://fake", transport=httpx.MockTransport(server)) as client:
        await client.record_reference("base", TEXT, method="disjoint", context_length=8)
    beside = KldServer(server.references, noise=0.2)
    async with AsyncScoreClient("http://fake", transport=httpx.MockTransport(beside)) as client:
        by_hand = await measure_kld(client, "base")
    assert near["statistics"] == by_hand.statistics


async def test_what_was_measured_is_kept_and_another_model_runs_alone(swept: Path):
    files = {path: path.stat().st_mtime_ns for path in (swept / "runs").glob("*.*")}
    assert (await sweep(swept, BASE, NEAR)).measured == []
    result = await sweep(swept, BASE, NEAR, FAR)
    assert (result.measured, list(result.runs)) == (["far"], ["base", "near", "far"])
    assert {path: path.stat().st_mtime_ns for path in files} == files


async def test_another_first_model_has_all_measured_again(swept: Path):
    assert (await sweep(swept, {**BASE, "serve": ["--flag", "1"]}, NEAR)).measured == ["base", "near"]


async def test_a_run_whose_file_is_gone_is_measured_again(swept: Path):
    (swept / "runs" / "near.safetensors").unlink()
    assert (await sweep(swept, BASE, NEAR)).measured == ["near"]


async def test_a_reference_that_is_gone_is_recorded_again(swept: Path):
    (kept,) = (swept / "runs" / "references").iterdir()
    shutil.rmtree(kept)
    assert (await sweep(swept, BASE, NEAR)).measured == [], "nobody needs it"
    assert (await sweep(swept, BASE, NEAR, FAR)).measured == ["base", "far"]
    assert kept.is_dir()


async def test_a_reference_that_is_not_complete_is_finished(swept: Path):
    (kept,) = (swept / "runs" / "references").iterdir()
    (kept / "manifest.json").write_text('{"result": null}')
    assert (await sweep(swept, BASE, NEAR, FAR)).measured == ["base", "far"]
    assert record(swept, "far")["kind"] == "kld"


async def test_a_failure_is_reported_with_the_log_and_the_others_go_on(tmp_path: Path):
    broken, foreign = {"name": "broken", "model": "broken"}, {"name": "foreign", "model": "foreign"}
    result = await sweep(tmp_path, BASE, broken, foreign, NEAR)
    assert list(result.runs) == ["base", "near"]
    assert set(result.failures) == {"broken", "foreign"}
    assert "the server ended with status 1" in result.failures["broken"]
    assert result.failures["broken"].endswith("out of memory, as always")
    assert "the tokenizers differ" in result.failures["foreign"]


async def test_a_command_that_is_not_there_is_a_failure(tmp_path: Path):
    result = await sweep(tmp_path, BASE, {**NEAR, "command": ["no-such-command"]})
    assert list(result.runs) == ["base"]
    assert "no command 'no-such-command'" in result.failures["near"]


async def test_a_server_that_does_not_come_up_is_given_up(tmp_path: Path):
    silent = {"name": "silent", "model": "m", "command": [sys.executable, "-c", "import time; time.sleep(60)"]}
    result = await sweep(tmp_path, silent, start_timeout=1)
    assert "not ready after 1 s" in result.failures["silent"]


async def test_without_the_first_the_others_have_their_perplexity(tmp_path: Path):
    result = await sweep(tmp_path, {**BASE, "model": "broken"}, NEAR)
    assert (list(result.runs), list(result.failures)) == (["near"], ["base"])
    assert record(tmp_path, "near")["kind"] == "perplexity"
    assert (await sweep(tmp_path, BASE, NEAR)).measured == ["base", "near"]
    assert record(tmp_path, "near")["kind"] == "kld"


async def test_a_first_that_fails_today_costs_no_run_that_was_measured_beside_it(tmp_path: Path):
    base = KldServer()
    near = {"name": "near", "url": ""}
    with serve(KldServer(base.references, noise=0.2)) as near["url"]:
        with serve(base) as url:
            await sweep(tmp_path, {"name": "base", "url": url}, near)
        before = record(tmp_path, "near")
        result = await sweep(tmp_path, {**BASE, "command": ["no-such-command"]}, near)
    assert (result.measured, list(result.runs), list(result.failures)) == ([], ["near"], ["base"])
    assert before["kind"] == "kld"
    assert record(tmp_path, "near") == before


async def test_a_server_that_dies_ends_its_model_and_the_next_sweep_goes_on_with_it(tmp_path: Path):
    allowed = tmp_path / "allowed"
    allowed.write_text("4")
    near = {**NEAR, "env": {ALLOWED: str(allowed)}}
    result = await sweep(tmp_path, BASE, near)
    assert "the server ended with status 7" in result.failures["near"]
    journal = tmp_path / "runs" / "near.json.journal"
    num_done = len(journal.read_text().splitlines()) - 1
    assert 0 < num_done <= 4
    allowed.unlink()
    assert (await sweep(tmp_path, BASE, near)).measured == ["near"]
    assert log(tmp_path, "near").count("POST /v1/kld") == NUM_WINDOWS - num_done
    assert not journal.exists()
    assert record(tmp_path, "near")["statistics"]["num_windows"] == NUM_WINDOWS


async def test_windows_of_another_model_are_not_gone_on_with(tmp_path: Path):
    (tmp_path / "allowed").write_text("4")
    near = {**NEAR, "env": {ALLOWED: str(tmp_path / "allowed")}}
    await sweep(tmp_path, BASE, near)
    assert (tmp_path / "runs" / "near.json.journal").is_file()
    # What a server tells of its model is the same with another flag.
    assert (await sweep(tmp_path, BASE, {**NEAR, "serve": ["--flag", "1"]})).measured == ["near"]
    assert log(tmp_path, "near").count("POST /v1/kld") == NUM_WINDOWS
    assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_file()} == {
        f"{name}.{kind}" for name in ("base", "near") for kind in ("json", "safetensors")
    }


async def test_a_file_that_no_sweep_wrote_is_no_run(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base.json").write_text('{"sweep": null}')
    assert (await sweep(tmp_path, BASE)).measured == ["base"]


async def test_a_server_that_lost_the_reference_costs_no_divergence(tmp_path: Path):
    references = KldServer().references
    near = {"name": "near", "url": ""}
    with serve(KldServer(references)) as url, serve(KldServer(references, noise=0.2)) as near["url"]:
        await sweep(tmp_path, {"name": "base", "url": url}, near)
        before = record(tmp_path, "near")
        references.clear()
        result = await sweep(tmp_path, {"name": "base", "url": url}, near)
    assert before["kind"] == "kld"
    assert (list(result.runs), record(tmp_path, "near")) == (["base", "near"], before)


async def test_no_server_is_left(tmp_path: Path):
    await sweep(tmp_path, BASE, {"name": "foreign", "model": "foreign"})
    assert not [command for command in running_commands() if str(tmp_path) in command]


async def test_servers_that_run_already_are_asked_what_they_serve(tmp_path: Path):
    base = KldServer()
    near = KldServer(base.references, noise=0.2)
    with serve(base) as base_url, serve(near) as near_url:
        models = {"name": "base", "url": base_url}, {"name": "near", "url": near_url}
        assert (await sweep(tmp_path, *models)).measured == ["base", "near"]
        assert record(tmp_path, "near")["kind"] == "kld"
        assert (await sweep(tmp_path, *models)).measured == []
        near.info["fingerprint"] = "another"
        assert (await sweep(tmp_path, *models)).measured == ["near"]


async def test_without_a_common_reference_perplexity_alone_is_measured_and_that_is_said(tmp_path: Path, caplog):
    with serve(KldServer()) as url:
        result = await sweep(tmp_path, {"name": "base", "url": url}, NEAR)
    assert result.measured == ["base", "near"]
    assert record(tmp_path, "near")["kind"] == "perplexity"
    assert "near: its server has no reference of the first model: perplexity alone is measured" in caplog.text


async def test_the_floor_is_kept_with_the_runs(tmp_path: Path):
    await sweep(tmp_path, BASE, NEAR, floor=True)
    assert record(tmp_path, "near")["reference"]["noise_floor"]["mean"] == 0


async def test_flags_and_variables_are_not_written_down(tmp_path: Path):
    await sweep(tmp_path, {**BASE, "serve": ["--flag", "a-secret"], "env": {"KEY": "a-secret"}})
    assert "a-secret" not in (tmp_path / "runs" / "base.json").read_text()
