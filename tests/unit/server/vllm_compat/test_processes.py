"""Processes that end with the one that started them; `tests/e2e/test_faults.py` kills a whole server."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from scoremode_server.vllm_compat import processes
from scoremode_server.vllm_compat.processes import run_tied


def test_vllms_processes_alone_are_tied_and_only_to_a_thread_that_stays(monkeypatch: pytest.MonkeyPatch):
    """A process of a user's own may outlive the script, and a thread of a notebook ends before its engine does."""
    started = list[Any]()
    monkeypatch.setattr(BaseProcess, "start", lambda self: started.append(self._target))
    processes.patch()
    engine = EngineCoreProc.run_engine_core

    def start(target: Callable[..., Any] | None) -> None:
        BaseProcess(target=target).start()

    for target in (engine, print, partial(engine), None):
        start(target)
    thread = threading.Thread(target=start, args=(engine,))
    thread.start()
    thread.join()
    tied, *others = started
    assert (tied.func, tied.args) == (run_tied, (os.getpid(), engine))
    assert others[0] is print
    assert others[2:] == [None, engine]
    assert not any(getattr(each, "func", None) is run_tied for each in others)


@pytest.mark.processes
@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_whose_starter_ended_before_it_was_watched_does_not_run(is_late: bool):
    starter = "1" if is_late else "os.getppid()"
    code = f"import os; from scoremode_server.vllm_compat.processes import run_tied; run_tied({starter}, print, 'ran')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (ended.returncode, ended.stdout) == ((-signal.SIGKILL, b"") if is_late else (0, b"ran\n"))
