"""The entry points by which vLLM finds Scoremode."""

from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from scoremode_server.routes import perplexity, score
from scoremode_server.state import make_state


class ScoremodeEndpoints:
    """vLLM's `EndpointPlugin`: vLLM calls `attach_router` once while it builds the app, then `init_state` once."""

    name = "scoremode"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(score.router)
        app.include_router(perplexity.router)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Make what the routes share. `engine_client` is None only on servers without an engine; they get no routes."""
        assert engine_client is not None
        state.scoremode = await make_state(engine_client, state)


def endpoint_plugin() -> ScoremodeEndpoints:
    """Entry point `vllm.endpoint_plugins`."""
    return ScoremodeEndpoints()
