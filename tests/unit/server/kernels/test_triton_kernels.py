"""The kernels run in Triton's interpreter, which a process is in as a whole or not at all: so in one of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "names",
    [
        ("kernels/interpreted_kernels.py", "kernels/interpreted_shards.py"),
        ("kernels/test_fused_logprobs.py",),
        ("kernels/test_kl_divergence.py",),
        ("vllm_patches/interpreted_windows.py",),
    ],
)
def test_in_the_interpreter(names: tuple[str, ...]):
    paths = [str(Path(__file__).parents[1] / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *paths]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[4],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
