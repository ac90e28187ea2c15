"""`X-Request-Id`: the name by which a client, a proxy and the log know one request."""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
LONGEST = 128

_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
"""Messages that carry the headers of an answer."""


class RequestIds:
    """Middleware that gives every request an id, `request.state.request_id`, and every answer the header with it.

    The client's own id is taken if it has 1 to 128 characters of printable ASCII. Any other is replaced by a fresh one,
    in the request as well: vLLM makes the engine's request ids and log lines of that header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        request_id = given if given is not None and _is_usable(given) else secrets.token_hex(16)
        if given is not None:
            MutableHeaders(scope=scope)[HEADER] = request_id
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                message.setdefault("headers", [])
                # Set, not added: vLLM's `--enable-request-id-headers` sends one as well.
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _is_usable(request_id: str) -> bool:
    return 0 < len(request_id) <= LONGEST and request_id.isascii() and request_id.isprintable()
