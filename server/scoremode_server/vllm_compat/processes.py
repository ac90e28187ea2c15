"""Ends vLLM's processes when the process that started them ends, for whatever reason. Otherwise an engine whose server
was killed would keep its GPU memory."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG = 1


def patch() -> None:
    """From now on, let each process that vLLM starts from this one end with this one: API servers, engines, workers,
    coordinators. Ray starts its workers itself, and ends them with their driver."""
    start = BaseProcess.start

    def start_tied(self: Any) -> None:
        module = getattr(self._target, "__module__", "")
        # The kernel watches the thread that starts a process. The main thread lives as long as its process.
        if module.startswith("vllm.") and threading.current_thread() is threading.main_thread():
            self._target = partial(run_tied, os.getpid(), self._target)
        start(self)

    if sys.platform == "linux":
        BaseProcess.start = start_tied  # type: ignore[method-assign]


def run_tied(starter: int, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a process's target. When the process that started it ends, the kernel kills this one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        # The starter ended before the kernel watched it.
        os.kill(os.getpid(), signal.SIGKILL)
    return target(*args, **options)
