"""Write openapi/openapi.json: the part of the running app's OpenAPI document that Scoremode adds to vLLM's.

The app is built here, without an engine.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

OPENAPI = Path(__file__).parent.parent / "openapi" / "openapi.json"

TAGS = {"scoring", "references"}
"""Mark the operations of Scoremode."""


def app_without_engine(*flags: str) -> "FastAPI":
    """The app that vLLM's server runs, with the plugins that VLLM_PLUGINS names, and no engine for its routes."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        # vLLM 0.32 has it elsewhere.
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    return build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(flags), ("generate",))


def scoremode_part(document: dict[str, Any]) -> dict[str, Any]:
    """The operations of Scoremode and the schemas that they use."""
    paths = {
        path: kept
        for path, operations in document["paths"].items()
        if (kept := {method: each for method, each in operations.items() if TAGS.intersection(each.get("tags", ()))})
    }
    schemas = document["components"]["schemas"]
    used: set[str] = set()
    pending = _references(paths)
    while pending:
        name = pending.pop()
        used.add(name)
        pending |= _references(schemas[name]) - used
    return {
        "openapi": document["openapi"],
        "info": {
            "title": "Scoremode",
            "description": "What Scoremode adds to vLLM's server; the whole of it is at /openapi.json of any server.",
            "version": "v1",
        },
        "paths": paths,
        "components": {"schemas": {name: schemas[name] for name in sorted(used)}},
    }


def _references(part: Any) -> set[str]:
    """Names of the schemas that a part of a document refers to."""
    if isinstance(part, dict):
        here = {part["$ref"].rpartition("/")[2]} if isinstance(part.get("$ref"), str) else set()
        return here.union(*map(_references, part.values()))
    return set().union(*map(_references, part)) if isinstance(part, list) else set()


def text(document: dict[str, Any]) -> str:
    """The file's content for an app's document."""
    return json.dumps(scoremode_part(document), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ["VLLM_PLUGINS"] = "scoremode"
    OPENAPI.write_text(text(app_without_engine().openapi()))
    print(OPENAPI)
