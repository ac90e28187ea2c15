"""`ppl-client` as a person runs it: a process of its own."""

import subprocess
import sys

TIMEOUT_SECONDS = 900
"""More than a sweep over two models takes."""


def ppl_client(*arguments: str) -> str:
    """What it printed on stdout; it must succeed."""
    command = [sys.executable, "-m", "scoremode.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout
