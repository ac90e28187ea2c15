"""uvicorn, the HTTP server of vLLM's API servers: when it ends connections, and what it does with requests that offer
another protocol."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CLOSE_SECONDS = 5
"""In which clients may read their last answers, when the engine is gone. uvicorn waits for every connection to close,
which one whose client reads nothing never does."""


class IgnoresOffers(HttpToolsProtocol):
    """uvicorn's protocol, which reads a request that offers another one as if it did not. Java's client offers HTTP/2
    with the first request of a connection (`Upgrade: h2c`). By itself, httptools takes the body for the other
    protocol."""

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        # uvicorn then starts no request at the end of the headers, and calls `handle_websocket_upgrade`.
        return self._get_upgrade() is not None

    def handle_websocket_upgrade(self) -> None:
        stopped = sys.exception()
        if super()._should_upgrade() or stopped is None:
            super().handle_websocket_upgrade()
            return
        headers = b"".join(b"%b: %b\r\n" % each for each in self.headers if each[0] != b"upgrade")
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.scope["method"].encode(), self.url, headers)
        # httptools says where the headers end.
        self.data_received(head + self._data[stopped.args[0] :])


def change_http_server(app: Any) -> None:
    """Have the HTTP server of an app, which is not served yet, cut off connections that are not closed `CLOSE_SECONDS`
    after its end began, and ignore offers of other protocols than WebSocket."""
    run = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any, None]:
        # vLLM makes the server when the app is finished, and has no flags for these.
        config = app.state.server.config
        config.timeout_graceful_shutdown = CLOSE_SECONDS
        if config.http_protocol_class is HttpToolsProtocol:
            config.http_protocol_class = IgnoresOffers
        async with run(app) as state:
            yield state

    app.router.lifespan_context = lifespan
