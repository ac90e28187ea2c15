"""`ppl-client` as a person runs it: a process of its own."""

import subprocess
import sys

TIMEOUT_SECONDS = 900
"""More than a sweep over two models takes."""


def run_ppl_client(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """What it printed, and its exit status, whichever that is."""
    return subprocess.run(
        [sys.executable, "-m", "scoremode.cli", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


def ppl_client(*arguments: str) -> str:
    """What it printed on stdout; it must succeed."""
    done = run_ppl_client(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
