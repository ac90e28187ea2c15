"""The entry points through which vLLM finds Scoremode. They import modules only when they are called: vLLM calls them
before it is fully imported, and in engine processes, which need no HTTP."""

import os
from argparse import Namespace
from typing import Any

from scoremode_server.settings import PLUGIN, PLUGINS_VARIABLE, allow_plugin, server_settings


class ScoremodeEndpoints:
    """Entry point `vllm.endpoint_plugins`: vLLM calls `attach_router` once while it builds the app, then `init_state`
    once."""

    name = "scoremode"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add our routes before vLLM's, and remove vLLM's routes of the same paths. Add our middleware, and change the
        HTTP server."""
        from scoremode_server.app import routers
        from scoremode_server.http.middleware import wrap
        from scoremode_server.vllm_compat.http_server import change_http_server

        # Our routes go first because routes are tried in order, by the router and again for vLLM's HTTP metrics.
        ours = routers(app)
        paths = {getattr(route, "path", None) for router in ours for route in router.routes}
        vllm_routes = [route for route in app.routes if getattr(route, "path", None) not in paths]
        app.router.routes.clear()
        for router in ours:
            app.include_router(router)
        app.router.routes.extend(vllm_routes)
        wrap(app)
        change_http_server(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Make the objects that routes share. vLLM does not call this on servers without an engine: see
        `required_tasks`."""
        from scoremode_server.app import prepare_process, start
        from scoremode_server.http.middleware import configured_keys

        await start(engine_client, state, server_settings(args), has_api_keys=bool(configured_keys(args)))
        prepare_process()


def general_plugin() -> None:
    """Entry point `vllm.general_plugins`, which vLLM calls in every process, possibly several times. It does nothing
    unless VLLM_PLUGINS names Scoremode. RuntimeError if Scoremode is named, but does not run on this vLLM."""
    if PLUGIN not in os.environ.get(PLUGINS_VARIABLE, "").split(","):
        return
    from scoremode_server.vllm_compat.versions import require_supported

    require_supported()
    from scoremode_server.vllm_compat.install import install

    install(_sink_makers)


def _sink_makers() -> dict[str, Any]:
    """Make an engine worker's `SinkMaker`s, by the names that requests use for their sinks."""
    from scoremode_server.references.worker.sinks import reference_sinks
    from scoremode_server.worker.sinks import SinkMaker, sink_classes

    return {name: SinkMaker(sink_class) for name, sink_class in sink_classes().items()} | reference_sinks()


def enable() -> None:
    """Turn on Scoremode for the engines of this process: call it before the first `vllm.LLM`. Prompt logprobs are then
    computed within a fixed working memory, as under `scoremode serve`. `score` works without it.

    Raises:
        RuntimeError: Scoremode does not run on this vLLM.
    """
    from scoremode_server.vllm_compat.versions import require_supported

    require_supported()
    allow_plugin()
    # vLLM loads plugins once per process, and may have done so already.
    general_plugin()
