"""An end of waiting for the header of a request, which uvicorn waits for as long as its client likes."""

import asyncio
from typing import Any

HEADER_SECONDS = 30
"""For the header of a request, from when its connection is made, or after another request from its first byte."""


def with_header_timeout(protocol: Any) -> Any:
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
