"""Threads for files: what hangs holds up its own reference, and not the process."""

import subprocess
import sys

import pytest

HANGS = """
import threading
from scoremode_server.references.file_threads import FileThreads
begun = threading.Event()
FileThreads().submit("hangs", lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


@pytest.mark.processes
def test_a_process_ends_while_a_call_hangs():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)
