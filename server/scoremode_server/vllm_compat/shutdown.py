"""Time for scoring requests to finish after the server is told to stop.

On SIGTERM vLLM shuts its engine down while requests are still in it. `--shutdown-timeout` lets the engine finish, but
the API server stops reading what it computes. vLLM calls `shutdown` of the engine client from a thread, which waits
for scoring requests here while the event loop still answers them.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

engine_died = threading.Event()
"""Set if an engine of this process was dead already when it was shut down."""


def drain_before_shutdown(engine: Any, drain: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Let an engine client's `shutdown` run `drain(seconds)` first, on the current event loop."""
    loop, thread, shutdown = asyncio.get_running_loop(), threading.get_ident(), engine.shutdown

    def drain_and_shut_down(timeout: float | None = None) -> None:
        # vLLM calls it twice.
        engine.shutdown = shutdown
        begun = time.monotonic()
        if engine.errored:
            engine_died.set()
        # After the engine's death vLLM calls it on the event loop itself, where nothing could wait for the loop.
        elif threading.get_ident() != thread and loop.is_running():
            asyncio.run_coroutine_threadsafe(drain(timeout or 0), loop).result()
        shutdown(timeout=None if timeout is None else max(0, timeout - (time.monotonic() - begun)))

    engine.shutdown = drain_and_shut_down
