"""The API key, asked for on every route but those that are open on purpose.

vLLM guards paths by prefix (`/v1`, `/v2`, `/inference`, `/cohere`). `/invocations` and `/generative_scoring`, which
score, `/tokenize`, `/tokenizer_info` and others answer anyone there. Here the open paths are listed, so that a route
which nobody thought of asks for the key.
"""

import hashlib
import secrets
from argparse import Namespace
from collections.abc import Iterable
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.status import WS_1008_POLICY_VIOLATION
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from vllm import envs
from vllm.entrypoints.serve import create_error_response

from scoremode_server.api import page

OPEN_PATHS = frozenset(
    {
        # Probes and scrapers, which seldom have a key.
        "/health",
        "/ping",
        "/version",
        "/metrics",
        # The API's description, which tells nothing of this server, and the pages that show it.
        "/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/static/swagger-ui-bundle.js",
        "/static/swagger-ui.css",
        # Files that are the same on every server. What the page shows, it asks for with the key that is typed in.
        *page.FILES,
    }
)
"""What answers without a key, as Starlette routes it: below the root path, and with or without slashes at the end."""


def configured_keys(args: Namespace) -> list[str]:
    """The API keys as vLLM takes them: those of `--api-key`, else the environment's. An empty key is none."""
    return [key for key in args.api_key or [envs.VLLM_API_KEY] if key]


class Authentication:
    """Middleware that answers requests without a valid `Authorization: Bearer KEY` itself, with 401.

    Preflight requests of browsers (OPTIONS) carry no key and pass. The 401 has the CORS headers that any other answer
    has, so that a page can read why it was refused.

    Args:
        app: What valid requests go to.
        keys: Any of these is valid.
        allowed_origins: Of CORS, as `--allowed-origins`.
        allow_credentials: Of CORS, as `--allow-credentials`.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], allowed_origins: Iterable[str] = (), allow_credentials: bool = False
    ) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._refuse = CORSMiddleware(_refuse, allow_origins=list(allowed_origins), allow_credentials=allow_credentials)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_open(scope) or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        digest = _digest(key)
        # All keys are compared, each in constant time: how long it takes tells nothing of which one is nearly right.
        found = [secrets.compare_digest(digest, valid) for valid in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _is_open(scope: Scope) -> bool:
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return True
    # What is left is what Starlette routes on wherever it is one of the open paths, which begin with a slash.
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/") in OPEN_PATHS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await WebSocketClose(WS_1008_POLICY_VIOLATION)(scope, receive, send)
        return
    given = "Authorization" in Headers(scope=scope)
    error = create_error_response(
        "The API key is not valid." if given else "An API key is required, as `Authorization: Bearer KEY`.",
        "AuthenticationError",
        HTTPStatus.UNAUTHORIZED,
    )
    headers = {"WWW-Authenticate": "Bearer"}
    await JSONResponse(error.model_dump(), HTTPStatus.UNAUTHORIZED, headers)(scope, receive, send)
