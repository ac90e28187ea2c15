"""Time for scoring requests to finish after the server is told to stop, and connections that the server ends.

On SIGTERM vLLM shuts its engine down while requests are still in it. `--shutdown-timeout` lets the engine finish, but
the API server stops reading what it computes. vLLM calls `shutdown` of the engine client from a thread, so there
scoring requests can be waited for while the event loop still answers them. Then uvicorn waits for every connection to
close, which one whose client reads nothing never does.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

CLOSE_SECONDS = 5
"""In which clients may read their last answers, when the engine is gone."""

HEADER_SECONDS = 30
"""For the header of a request, which uvicorn waits for as long as its client likes: from when its connection is made,
or after another request from its first byte."""


class Shutdown:
    """Takes the place of an engine client's `shutdown`: runs `drain(seconds)` on the event loop first.

    It must be made on that loop.

    Attributes:
        engine_died: whether the engine was dead already when it was shut down.
    """

    def __init__(self, engine: Any, drain: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        self.engine_died = False
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
    """Have the HTTP server of an app cut off connections that are not closed `CLOSE_SECONDS` after its end began, and
    those on which no whole header arrives.

    It must be called before the app is served.
    """
    run = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any, None]:
        # vLLM makes the server when the app is finished, and has no flag for this.
        config = app.state.server.config
        config.timeout_graceful_shutdown = CLOSE_SECONDS
        config.http_protocol_class = _with_header_timeout(config.http_protocol_class)
        async with run(app) as state:
            yield state

    app.router.lifespan_context = lifespan


def _with_header_timeout(protocol: Any) -> Any:
    """One of uvicorn's HTTP protocols that closes connections whose header is not there in time."""

    class HeaderTimeout(protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._ending = self.loop.call_later(HEADER_SECONDS, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            is_websocket = self.transport.get_protocol() is not self
            if is_websocket or (self.cycle and not self.cycle.response_complete):
                self._ending.cancel()
            elif self._ending.cancelled():
                self._ending = self.loop.call_later(HEADER_SECONDS, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._ending.cancel()
            super().connection_lost(exc)

    return HeaderTimeout
