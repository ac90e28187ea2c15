"""What every request of the server passes before any of vLLM's own middleware."""

from fastapi import FastAPI
from starlette.types import ASGIApp

from scoremode_server.api.authentication import Authentication, configured_keys
from scoremode_server.api.request_ids import RequestIds


def surround(app: FastAPI) -> None:
    """Put request ids, and API keys where there are any, around all middleware that the app has or will have.

    `app.add_middleware` cannot do this. A plugin adds its routes before vLLM adds its middleware, which would be
    outside, and makes its state after vLLM's SageMaker part has built the stack; a stack that is built twice loses the
    HTTP metrics. Starlette's own outermost middleware answers unexpected exceptions, and those answers need an id too.
    """
    args = app.state.args
    keys = configured_keys(args)
    build = app.build_middleware_stack

    def build_surrounded() -> ASGIApp:
        stack = build()
        if keys:
            stack = Authentication(stack, keys, args.allowed_origins, args.allow_credentials)
        return RequestIds(stack)

    app.build_middleware_stack = build_surrounded  # type: ignore[method-assign]
