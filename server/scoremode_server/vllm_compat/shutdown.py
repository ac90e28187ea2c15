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


class Shutdown:
    """Takes the place of an engine client's `shutdown`: runs `drain(seconds)` on the event loop first, on which it must
    be made."""

    def __init__(self, engine: Any, drain: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        self.engine_died = False
        """Whether the engine was dead already when it was shut down."""
        self._engine = engine
        self._drain = drain
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._shutdown = engine.shutdown
        self._begun = False
        engine.shutdown = self

    def __call__(self, timeout: float | None = None) -> None:
        """Shut down. vLLM calls it twice, and after the engine's death on the event loop itself."""
        begun = time.monotonic()
        if not self._begun:
            self._begun = True
            self.engine_died = self._engine.errored
            # On the loop's own thread nothing could wait for it.
            if not self.engine_died and threading.get_ident() != self._thread and self._loop.is_running():
                asyncio.run_coroutine_threadsafe(self._drain(timeout or 0), self._loop).result()
        self._shutdown(timeout=None if timeout is None else max(0, timeout - (time.monotonic() - begun)))
