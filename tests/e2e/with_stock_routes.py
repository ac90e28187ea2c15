"""A server with vLLM's own routes that ours replace kept under /stock: both answer from one engine.

python with_stock_routes.py scoremode [arguments of `scoremode serve`]
python with_stock_routes.py vllm [arguments of vLLM's own server]      with the plugin where VLLM_PLUGINS names it
"""

import sys

from fastapi import Depends, FastAPI
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as stock
from vllm.entrypoints.scale_out.token_in_token_out import api_router as token_ids
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from scoremode_server import cli, plugin
from scoremode_server.completions.routes import GENERATE

attach_router = plugin.ScoremodeEndpoints.attach_router


def attach_both(self: plugin.ScoremodeEndpoints, app: FastAPI) -> None:
    routes = {"/v1/completions": stock.create_completion, "/v1/chat/completions": chat.create_chat_completion}
    if any(getattr(route, "path", None) == GENERATE for route in app.routes):
        routes[GENERATE] = token_ids.generate
    attach_router(self, app)
    for path, endpoint in routes.items():
        app.add_api_route(
            f"/stock{path}",
            endpoint,
            methods=["POST"],
            dependencies=[Depends(validate_json_request)],
            include_in_schema=False,
        )


def main() -> None:
    plugin.ScoremodeEndpoints.attach_router = attach_both
    which = sys.argv.pop(1)
    if which == "scoremode":
        cli.serve(sys.argv[1:])
    else:
        from vllm.entrypoints.launchers.api_server import entry

        entry.main()


if __name__ == "__main__":
    main()
