"""Time for scoring requests to finish after the server is told to stop, and connections that the server ends.

On SIGTERM vLLM shuts its engine down while requests are still in it. `--shutdown-timeout` lets the engine finish, but
the API server stops reading what it computes. vLLM calls `shutdown` of the engine client from a thread, which waits
for scoring requests here while the event loop still answers them. Then uvicorn waits for every connection to close,
which one whose client reads nothing never does.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

CLOSE_SECONDS = 5
"""In which clients may read their last answers, when the engine is gone."""


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


def bound_connections(app: Any) -> None:
    """Have the HTTP server of an app, which is not served yet, cut off connections that are not closed `CLOSE_SECONDS`
    after its end began."""
    run = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any, None]:
        # vLLM makes the server when the app is finished, and has no flag for this.
        app.state.server.config.timeout_graceful_shutdown = CLOSE_SECONDS
        async with run(app) as state:
            yield state

    app.router.lifespan_context = lifespan
