"""The API key, required on every route except those in `OPEN_PATHS`. vLLM itself guards some path prefixes only."""

import hashlib
import secrets
from argparse import Namespace
from collections.abc import Iterable
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve import create_error_response

from scoremode_server.api import page

OPEN_PATHS = frozenset(
    {
        # Probes and scrapers, which seldom have a key.
        *("/health", "/ping", "/version", "/metrics"),
        # The API's description, which is the same on every server, and the pages that show it.
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
        *("/static/swagger-ui-bundle.js", "/static/swagger-ui.css"),
        # Files that are the same on every server. The page requests scores with the key that the user types in.
        *page.FILES,
    }
)
"""Paths that need no key, below the root path and with or without slashes at the end, as Starlette routes them."""


def configured_keys(args: Namespace) -> list[str]:
    """The API keys as vLLM reads them: those of `--api-key`, else the environment's. Empty keys do not count."""
    return [key for key in args.api_key or [envs.VLLM_API_KEY] if key]


class Authentication:
    """Middleware that answers requests without a valid `Authorization: Bearer KEY` with 401.

    Browsers' preflight requests (OPTIONS) have no key and pass. The 401 has CORS headers, for `--allowed-origins` and
    `--allow-credentials`, so that a page can read it.
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
        # Every key is compared, in constant time, so that the time reveals nothing about a key.
        found = [secrets.compare_digest(digest, valid) for valid in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _is_open(scope: Scope) -> bool:
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return True
    # Open paths begin with a slash, so the rest is what Starlette routes on.
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/") in OPEN_PATHS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    given = "Authorization" in Headers(scope=scope)
    message = "The API key is not valid." if given else "An API key is required, as `Authorization: Bearer KEY`."
    error = create_error_response(message, "AuthenticationError", HTTPStatus.UNAUTHORIZED)
    headers = {"WWW-Authenticate": "Bearer"}
    await JSONResponse(error.model_dump(), HTTPStatus.UNAUTHORIZED, headers)(scope, receive, send)
