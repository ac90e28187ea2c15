"""Ends vLLM's processes with the one that started them, however that ends: an engine whose server was killed would keep
its GPU memory."""

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
    """Tie each process that vLLM starts from this process from now on: API servers, engines, workers, coordinators.
    Ray's workers have another starter, and end with their driver."""
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
    """Run a process's target, until the process that started it has ended: then the kernel kills this one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        # It ended before the kernel watched it.
        os.kill(os.getpid(), signal.SIGKILL)
    return target(*args, **options)
