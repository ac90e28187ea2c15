"""Middleware around all of vLLM's own."""

from fastapi import FastAPI
from starlette.types import ASGIApp

from scoremode_server.api.authentication import Authentication, configured_keys
from scoremode_server.api.request_ids import RequestIds


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
