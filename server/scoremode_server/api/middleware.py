"""Middleware around all of vLLM's own: request ids (`X-Request-Id`) and API keys."""

import secrets

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scoremode_server.api.authentication import Authentication, configured_keys

HEADER = "X-Request-Id"
LONGEST = 128

_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
"""Messages that carry the headers of an answer."""


class RequestIds:
    """Middleware that sets `request.state.request_id`, and the header on every answer.

    The client's id is used if it has 1 to 128 characters of printable ASCII. Any other is replaced, in the request's
    header as well, from which vLLM makes the engine's ids and log lines.
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
                # Replaced, not added: vLLM's `--enable-request-id-headers` adds one as well.
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _is_usable(request_id: str) -> bool:
    return 0 < len(request_id) <= LONGEST and request_id.isascii() and request_id.isprintable()


def wrap(app: FastAPI) -> None:
    """Put request ids, and API keys where there are any, around all middleware that the app has or will have.

    `app.add_middleware` cannot: vLLM adds its middleware later, outside, and Starlette's outermost middleware, which
    answers unexpected exceptions, is always outside.
    """
    args = app.state.args
    keys = configured_keys(args)
    build = app.build_middleware_stack

    def build_wrapped() -> ASGIApp:
        stack = build()
        if keys:
            stack = Authentication(stack, keys, args.allowed_origins, args.allow_credentials)
        return RequestIds(stack)

    app.build_middleware_stack = build_wrapped  # type: ignore[method-assign]
