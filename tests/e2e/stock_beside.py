"""`scoremode serve`, with vLLM's own completions route kept at /stock/v1/completions: both answer from one engine."""

import sys

from fastapi import Depends, FastAPI
from vllm.entrypoints.openai.completion import api_router as stock
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from scoremode_server import cli, plugin

attach_router = plugin.ScoremodeEndpoints.attach_router


def attach_both(self: plugin.ScoremodeEndpoints, app: FastAPI) -> None:
    attach_router(self, app)
    app.add_api_route(
        "/stock/v1/completions",
        stock.create_completion,
        methods=["POST"],
        dependencies=[Depends(validate_json_request)],
        include_in_schema=False,
    )


if __name__ == "__main__":
    plugin.ScoremodeEndpoints.attach_router = attach_both
    cli.serve(sys.argv[1:])
