"""Triton's kernels in its interpreter, in a process of their own (`conftest.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.interpreter, pytest.mark.processes]


@pytest.mark.parametrize("module", ["kernels/test_fused_logprobs.py", "references/worker/test_kl_divergence.py"])
def test_kernels_in_the_interpreter(module: str):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreter", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).parents[1] / module)],
        cwd=Path(__file__).parents[4],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
