"""Changes uvicorn, the HTTP server of vLLM's API servers: when it ends connections, and how it reads requests that
offer another protocol."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CLOSE_SECONDS = 5
"""Time limit for clients to read their last answers after the engine has ended. Without it, uvicorn waits forever for a
connection whose client reads nothing."""


class IgnoresOffers(HttpToolsProtocol):
    """uvicorn's HTTP protocol class, changed to ignore a request's offer of another protocol. Java's client offers
    HTTP/2 with a connection's first request (`Upgrade: h2c`), and httptools would take the body for the other
    protocol."""

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        # If this is True, uvicorn starts no request at the end of the headers, and calls `handle_websocket_upgrade`.
        return self._get_upgrade() is not None

    def handle_websocket_upgrade(self) -> None:
        stopped = sys.exception()
        if super()._should_upgrade() or stopped is None:
            super().handle_websocket_upgrade()
            return
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.scope["method"].encode(), self.url, headers)
        # The exception of httptools says where the headers end.
        self.data_received(head + self._data[stopped.args[0] :])


def change_http_server(app: Any) -> None:
    """Have an app's HTTP server cut off connections that are still open `CLOSE_SECONDS` after it begins to stop, and
    ignore offers of protocols other than WebSocket. The app must not be served yet."""
    run = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any, None]:
        # vLLM makes the server when the app is finished, and has no flags for these two settings.
        config = app.state.server.config
        config.timeout_graceful_shutdown = CLOSE_SECONDS
        if config.http_protocol_class is HttpToolsProtocol:
            config.http_protocol_class = IgnoresOffers
        async with run(app) as state:
            yield state

    app.router.lifespan_context = lifespan
