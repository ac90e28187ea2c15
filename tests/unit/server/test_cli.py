"""The command `scoremode`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["--help"], 0), ([], 2), (["score"], 2)])
def test_exit_status(arguments: list[str], status: int):
    command = [sys.executable, "-c", "from scoremode_server.cli import main; main()", *arguments]
    assert subprocess.run(command, capture_output=True).returncode == status
