"""A time of grace for scoring requests when the server is told to stop.

On SIGTERM vLLM shuts its engine down while requests are still in it. `--shutdown-timeout` lets the engine go on, but
the API server stops reading what it computes. vLLM calls `shutdown` of the engine client from a thread, so there
scoring requests can be waited for while the event loop still answers them.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any


def drain_before_shutdown(engine: Any, drain: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Let an engine client's `shutdown` run `drain(seconds)` on the event loop first, which this is called on."""
    loop, shutdown = asyncio.get_running_loop(), engine.shutdown
    drained = False

    def drain_then_shutdown(timeout: float | None = None) -> None:
        nonlocal drained
        begun = time.monotonic()
        if not drained and _is_elsewhere(loop) and not engine.errored:
            drained = True
            asyncio.run_coroutine_threadsafe(drain(timeout or 0), loop).result()
        shutdown(timeout=None if timeout is None else max(0, timeout - (time.monotonic() - begun)))

    engine.shutdown = drain_then_shutdown


def _is_elsewhere(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop runs in another thread, and so would not be blocked by waiting for it."""
    try:
        return asyncio.get_running_loop() is not loop
    except RuntimeError:
        return loop.is_running()
