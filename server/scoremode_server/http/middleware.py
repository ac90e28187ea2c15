"""Middleware that wraps all of vLLM's own. It gives requests their ids (`X-Request-Id`), and requires an API key on
every path except `OPEN_PATHS`. vLLM itself guards only some path prefixes."""

import secrets
from argparse import Namespace
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from scoremode_server.http import page

HEADER = "X-Request-Id"

_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
"""Types of ASGI messages that carry the headers of an answer."""

OPEN_PATHS = frozenset(
    {
        # Probes and scrapers use these paths, and seldom have a key.
        *("/health", "/ping", "/version", "/metrics"),
        # The API's description is the same on every server, as are the pages that show it.
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
        *("/static/swagger-ui-bundle.js", "/static/swagger-ui.css"),
        # The page's files are the same on every server. Its requests for scores have the key that the user types in.
        *page.FILES,
    }
)
"""Paths that need no key. They are relative to the server's root path, and may have slashes at the end."""


def configured_keys(args: Namespace) -> list[str]:
    """The API keys as vLLM reads them: those of `--api-key`, else the environment's. Empty keys do not count."""
    return [key for key in args.api_key or [envs.VLLM_API_KEY] if key]


class Authentication(AuthenticationMiddleware):
    """Requires an API key on all paths but `OPEN_PATHS`, and compares keys in constant time, as vLLM's middleware does.
    Requests without a valid `Authorization: Bearer KEY` get 401.

    Browsers' preflight requests (OPTIONS) have no key and pass. The 401 has CORS headers, for `--allowed-origins` and
    `--allow-credentials`, so that a page can read it.
    """

    def __init__(
        self, app: ASGIApp, keys: list[str], allowed_origins: Iterable[str] = (), allow_credentials: bool = False
    ) -> None:
        super().__init__(app, keys)
        self._refuse = CORSMiddleware(_refuse, allow_origins=list(allowed_origins), allow_credentials=allow_credentials)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_key = _is_open(scope) or self.verify_token(Headers(scope=scope))
        await (self.app if has_key else self._refuse)(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return True
    # Open paths begin with a slash, so below the root path /root, /root/docs is open, but not /rootdocs.
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/") in OPEN_PATHS


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    has_key = "Authorization" in Headers(scope=scope)
    message = "The API key is not valid." if has_key else "An API key is required, as `Authorization: Bearer KEY`."
    error = create_error_response(message, "AuthenticationError", HTTPStatus.UNAUTHORIZED)
    headers = {"WWW-Authenticate": "Bearer"}
    await JSONResponse(error.model_dump(), HTTPStatus.UNAUTHORIZED, headers)(scope, receive, send)


class RequestIds:
    """Middleware that sets `request.state.request_id`, and the `X-Request-Id` header of every answer.

    The client's id is used if it has 1 to 128 characters of printable ASCII. Any other id is replaced, in the request's
    header too, because vLLM makes the engine's ids and log lines from that header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(HEADER)
        request_id = secrets.token_hex(16)
        if client_id and len(client_id) <= 128 and client_id.isascii() and client_id.isprintable():
            request_id = client_id
        if client_id is not None:
            MutableHeaders(scope=scope)[HEADER] = request_id
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                message.setdefault("headers", [])
                # Replace the header, because vLLM's `--enable-request-id-headers` may have added one.
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def wrap(app: FastAPI) -> None:
    """Wrap all middleware that the app has or will have in request ids, and in API keys if there are any.

    `app.add_middleware` cannot do this. vLLM adds its middleware later and so outside, and Starlette's outermost
    middleware, which answers unexpected exceptions, is always outside.
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
