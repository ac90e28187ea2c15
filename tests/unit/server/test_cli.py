"""Which plugins a server started by `scoremode serve` may load."""

import importlib.metadata
import subprocess
import sys

import pytest

from scoremode_server import cli


class Point:
    def __init__(self, name: str) -> None:
        self.name = name


def test_scoremode_is_added_to_the_plugins_that_were_named():
    assert cli.allowed_plugins("lora,stats") == "lora,stats,scoremode"
    assert cli.allowed_plugins("scoremode,lora") == "scoremode,lora"
    assert cli.allowed_plugins("") == "scoremode"


def test_plugins_that_load_by_default_still_do(monkeypatch: pytest.MonkeyPatch):
    installed = {"vllm.general_plugins": [Point("lora"), Point("scoremode")], "vllm.platform_plugins": [Point("tpu")]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: installed.get(group, []))
    assert cli.allowed_plugins(None) == "lora,scoremode,tpu"


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["--help"], 0), ([], 2), (["score"], 2)])
def test_exit_status(arguments: list[str], status: int):
    command = [sys.executable, "-c", "from scoremode_server.cli import main; main()", *arguments]
    assert subprocess.run(command, capture_output=True).returncode == status
