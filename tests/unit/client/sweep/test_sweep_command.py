"""`ppl-client sweep` from end to end: what it prints, and that it leaves no server when it is stopped."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, StoredReference, serve
from safetensors.numpy import load_file

from scoremode.cli import main

pytestmark = pytest.mark.processes

# What it writes into a pipe shows how long it runs.
SILENT = "import sys, time; pipe = open(sys.argv[1], 'wb', 0); pipe.write(b'up'); time.sleep(120); pipe.write(b'left')"
NO_FILES = {"html": None, "plots": None}
TRACEBACK = (
    "print('(EngineCore pid=7) ERROR ValueError: no \\x1b[31m memory for the cache');"
    "raise RuntimeError('Engine core initialization failed. See root cause above.')"
)


def write_plan(folder: Path, *models: dict[str, Any], **changes: Any) -> str:
    windows = {"method": "disjoint", "context_length": 8}
    plan = {"output": "runs", "text": {"text": "The quick brown fox. " * 8}, "windows": windows, "models": models}
    (folder / "plan.yaml").write_text(json.dumps({**plan, **changes}))
    return str(folder / "plan.yaml")


def test_a_sweep_ends_with_a_comparison_and_the_log_of_each_failure(tmp_path: Path, capsys):
    base, runs = FakeServer(), tmp_path / "runs"
    near_server = FakeServer(base.references, noise=0.2)
    broken = {"name": "broken", "model": "m", "command": [sys.executable, "-c", TRACEBACK]}
    with serve(base) as base_url, serve(near_server) as near_url:
        models = [{"name": "base", "url": base_url}, {"name": "near", "url": near_url}]
        assert main(["sweep", write_plan(tmp_path, *models, broken), "--quiet"]) == 1
        printed = capsys.readouterr()
        assert [name in printed.out for name in ("base", "near", "broken")] == [True, True, False]
        *lines, last = printed.err.splitlines()
        assert f"ppl-client: model 1 of 3, base: served at {base_url}" in lines
        assert f"ppl-client: model 2 of 3, near: served at {near_url}" in lines
        assert "\nppl-client: model 3 of 3, broken: loading `" in printed.err
        reason = f"status 1 (log {runs}/logs/broken.log): ValueError: no \\x1b[31m memory for the cache"
        assert last == f"ppl-client: broken failed: the server ended with {reason}"
        assert list((runs / "plots").glob("*.svg"))
        written = (runs / "report.html").stat().st_mtime_ns
        assert main(["sweep", write_plan(tmp_path, *models, compare=NO_FILES), "--quiet"]) == 0
        messages = capsys.readouterr().err
        near_server.info["fingerprint"] = "another"
        assert main(["sweep", write_plan(tmp_path, *models, compare=NO_FILES), "--quiet"]) == 0
        assert capsys.readouterr().err.count("measured before") == 1, "servers are asked what they serve"
    assert messages.count("measured before") == 2
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


def test_local_models_are_looked_for_before_any_is_served(tmp_path: Path, capsys):
    (tmp_path / "checkpoints" / "int8").mkdir(parents=True)
    models = [{"name": each, "model": f"./checkpoints/{each}", "command": ["false"]} for each in ("int8", "int4")]
    assert main(["sweep", write_plan(tmp_path, *models)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"int4: there is no {tmp_path}/checkpoints/int4")
    assert not (tmp_path / "runs").exists()


def test_a_sweep_scores_the_text_of_its_first_model_once(tmp_path: Path, monkeypatch):
    event = StoredReference.event

    def with_ranks(self, index):
        logprobs = [-each for each in self.nlls([index])]
        return {**event(self, index), "logprobs": logprobs, "ranks": [7 + index] * len(logprobs)}

    monkeypatch.setattr(StoredReference, "event", with_ranks)
    server = FakeServer()
    with serve(server) as url:
        assert main(["sweep", write_plan(tmp_path, {"name": "base", "url": url}, compare=NO_FILES), "--quiet"]) == 0
    assert server.score_requests == []
    [stored] = server.references.values()
    arrays, nlls = load_file(tmp_path / "runs" / "base.safetensors"), stored.nlls(range(len(stored.windows)))
    assert (-arrays["logprobs"]).tolist() == nlls
    assert arrays["ranks"].tolist() == [7 + index for index in range(len(stored.windows)) for _ in range(7)]
