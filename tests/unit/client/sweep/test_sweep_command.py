"""`ppl-client sweep` from end to end, over processes that stand in for servers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_run_sweep import BASE, FAR, NEAR, STAND_IN, running_commands

from scoremode.cli import main

pytestmark = pytest.mark.processes

TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow! " * 4
SILENT = {"name": "silent", "model": "m", "command": [sys.executable, "-c", "import time; time.sleep(600)"]}


def write_plan(folder: Path, *models: dict[str, Any], **changes: Any) -> str:
    plan = {
        "output": "runs",
        "text": {"text": TEXT},
        "windows": {"method": "disjoint", "context_length": 8},
        "command": STAND_IN,
        "models": list(models),
        **changes,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return str(path)


def test_a_sweep_ends_with_a_comparison_of_all_that_was_measured(tmp_path: Path, capsys):
    plan = write_plan(tmp_path, BASE, {"name": "broken", "model": "broken"}, NEAR, FAR)
    assert main(["sweep", plan, "--quiet"]) == 1
    printed = capsys.readouterr()
    assert all(name in printed.out for name in ("base", "near", "far"))
    assert "broken" not in printed.out
    assert printed.err.splitlines()[-1] == "    out of memory, as always"
    assert "ppl-client: near: measuring KL divergence and perplexity" in printed.err.splitlines()
    assert (tmp_path / "runs" / "report.html").is_file()
    assert list((tmp_path / "runs" / "plots").glob("*.svg"))
    report = (tmp_path / "runs" / "report.html").stat().st_mtime_ns
    plan = write_plan(tmp_path, BASE, NEAR, FAR, compare={"html": None, "plots": None})
    assert main(["sweep", plan, "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("measured before") == 3
    assert (tmp_path / "runs" / "report.html").stat().st_mtime_ns == report


def test_runs_of_different_versions_are_told(tmp_path: Path, capsys):
    plan = write_plan(tmp_path, BASE, NEAR, compare={"html": None, "plots": None})
    assert main(["sweep", plan, "--quiet"]) == 0
    assert "different versions" not in capsys.readouterr().err
    run = tmp_path / "runs" / "near.json"
    record = json.loads(run.read_text())
    record["server"]["vllm_version"] = "0.33.0"
    run.write_text(json.dumps(record))
    assert main(["sweep", plan, "--quiet"]) == 0
    assert "scoremode 9.9.9 on vLLM 0.33.0: near" in capsys.readouterr().err


def test_a_plan_that_is_wrong_is_an_error_in_one_line(tmp_path: Path, capsys):
    plan = write_plan(tmp_path, {"name": "base"})
    assert main(["sweep", plan]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppl-client: error: {plan}: models[0] (base): give a model to serve")


def test_a_sweep_without_a_plan_is_wrong_usage():
    with pytest.raises(SystemExit) as ended:
        main(["sweep"])
    assert ended.value.code == 2


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['yaml'] = None; from scoremode.cli import main; sys.exit(main(['sweep', 'plan']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'ppl-client: error: yaml is missing: pip install "scoremode[report]"\n'


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_sweep_that_is_stopped_leaves_no_server(tmp_path: Path, signal_number: signal.Signals):
    silent = {**SILENT, "serve": [str(tmp_path)]}
    command = [sys.executable, "-m", "scoremode.cli", "sweep", write_plan(tmp_path, silent)]

    def servers() -> list[str]:
        """Those that are Python by now: what starts them has their whole command in its own."""
        python = [each for each in running_commands() if each.startswith(sys.executable)]
        return [each for each in python if "time.sleep(600)" in each and str(tmp_path) in each]

    # A script that runs it in the background has it ignore SIGINT, and not SIGTERM.
    ignores = "--ignore-signal" if signal_number == signal.SIGTERM else "--default-signal"
    command = ["env", f"{ignores}=INT", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sweep:
        wait_until(servers)
        sweep.send_signal(signal_number)
        _, messages = sweep.communicate(timeout=60)
    if signal_number == signal.SIGKILL:
        assert sweep.returncode == -signal.SIGKILL
        wait_until(lambda: not servers())
    else:
        assert sweep.returncode == 130
        assert messages.endswith("interrupted, servers are stopped: the same command goes on\n")
        assert not servers()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
