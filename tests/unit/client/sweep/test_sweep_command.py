"""`ppl-client sweep` from end to end: what it prints last, and that it leaves no server when it is stopped."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, serve

from scoremode.cli import main

pytestmark = pytest.mark.processes

# What it writes into a pipe shows how long it runs.
SILENT = "import sys, time; pipe = open(sys.argv[1], 'wb', 0); pipe.write(b'up'); time.sleep(120); pipe.write(b'left')"


def write_plan(folder: Path, *models: dict[str, Any], **changes: Any) -> str:
    windows = {"method": "disjoint", "context_length": 8}
    plan = {"output": "runs", "text": {"text": "The quick brown fox. " * 8}, "windows": windows, "models": models}
    (folder / "plan.yaml").write_text(json.dumps({**plan, **changes}))
    return str(folder / "plan.yaml")


def test_a_sweep_ends_with_a_comparison_and_the_log_of_each_failure(tmp_path: Path, capsys):
    base, runs = FakeServer(), tmp_path / "runs"
    broken = {"name": "broken", "model": "m", "command": [sys.executable, "-c", "raise SystemExit('out of memory')"]}
    with serve(base) as base_url, serve(FakeServer(base.references, noise=0.2)) as near_url:
        models = [{"name": "base", "url": base_url}, {"name": "near", "url": near_url}]
        assert main(["sweep", write_plan(tmp_path, *models, broken), "--quiet"]) == 1
        printed = capsys.readouterr()
        assert [name in printed.out for name in ("base", "near", "broken")] == [True, True, False]
        assert printed.err.splitlines()[-1].endswith(f" (log {runs}/logs/broken.log): out of memory")
        assert list((runs / "plots").glob("*.svg"))
        written = (runs / "report.html").stat().st_mtime_ns
        near = runs / "near.json"
        near.write_text(near.read_text().replace('"vllm_version": "0.32.0"', '"vllm_version": "0.33.0"'))
        assert main(["sweep", write_plan(tmp_path, *models, compare={"html": None, "plots": None}), "--quiet"]) == 0
    messages = capsys.readouterr().err
    assert messages.count("measured before") == 2
    assert "scoremode 9.9.9 on vLLM 0.33.0: near" in messages
    assert (runs / "report.html").stat().st_mtime_ns == written


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_sweep_that_is_stopped_leaves_no_server(tmp_path: Path, signal_number: signal.Signals):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    silent = {"name": "silent", "model": "m", "command": [sys.executable, "-c", SILENT, str(tmp_path / "pipe")]}
    # A script that runs it in the background has it ignore SIGINT, and not SIGTERM.
    ignores = "--ignore-signal" if signal_number == signal.SIGTERM else "--default-signal"
    client = ["env", f"{ignores}=INT", sys.executable, "-m", "scoremode.cli", "sweep", write_plan(tmp_path, silent)]
    with subprocess.Popen(client, stderr=subprocess.PIPE, text=True) as sweep:
        assert select.select([pipe], [], [], 60)[0]
        assert os.read(pipe, 9) == b"up"
        sweep.send_signal(signal_number)
        _, messages = sweep.communicate(timeout=60)
    is_killed = signal_number == signal.SIGKILL
    assert sweep.returncode == (-signal.SIGKILL if is_killed else 130)
    assert is_killed or messages.endswith("interrupted, servers are stopped: the same command resumes it\n")
    assert select.select([pipe], [], [], 60)[0]
    assert os.read(pipe, 9) == b"", "the end: nobody writes any more"
    os.close(pipe)
