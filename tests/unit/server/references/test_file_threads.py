"""Threads for files: what hangs holds up its own reference, and not the process."""

import subprocess
import sys
import threading

import pytest

from scoremode_server.references.file_threads import THREADS, FileThreads

HANGS = """
import threading
from scoremode_server.references.file_threads import FileThreads
begun = threading.Event()
FileThreads().submit("hangs", lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


def test_calls_that_hang_leave_other_references_alone():
    threads, let_go, num_others = FileThreads(), threading.Event(), threading.active_count()
    hang = [threads.submit("hangs", let_go.wait) for _ in range(2 * THREADS)]
    assert threads.submit("answers", lambda: 5).result(30) == 5
    waiting = threads.submit("hangs", lambda: 6)
    assert threading.active_count() <= num_others + THREADS + 1
    # What was not begun can be given up.
    assert hang[-1].cancel()
    let_go.set()
    assert waiting.result(30) == 6


@pytest.mark.processes
def test_a_process_ends_while_a_call_hangs():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)
