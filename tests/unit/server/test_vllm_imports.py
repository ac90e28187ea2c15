"""The server imports only allowed names from vLLM, in allowed places.

Private parts of vLLM are for modules that run in its processes, for `completions`, which extends its handlers, and for
conversations, which its renderers render. All other modules keep to the list below. Ruff checks that no other module
uses a private attribute (SLF001).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm

from scoremode_server.vllm_compat.versions import Sources

SERVER = Path(__file__).parents[3] / "server" / "scoremode_server"
EXEMPT = ("completions", "references/worker", "scoring/conversations.py", "vllm_compat", "worker")

ENTRYPOINTS = {
    # A route of an endpoint plugin needs these to behave as vLLM's own do.
    *("serve", "serve.engine.protocol", "serve.middleware.authenticate", "serve.utils.api_utils"),
    # `scoremode serve` runs these.
    *("cli.serve", "common.startup"),
}
PARTS = {
    # vLLM documents these for users of the engine; the types of its parts are included.
    *("config", "engine.protocol", "envs", "inputs", "logger", "logprobs", "outputs", "platforms", "renderers"),
    *("renderers.base", "sampling_params", "tokenizers", "tokenizers.detokenizer_utils", "utils"),
    *("utils.argparse_utils", "v1.engine.exceptions"),
}
PUBLIC = {"vllm", *(f"vllm.{name}" for name in PARTS), *(f"vllm.entrypoints.{name}" for name in ENTRYPOINTS)}

sources = Sources(Path(vllm.__file__).parents[1])


def modules_imported(tree: ast.Module) -> Iterator[str]:
    """The modules of vLLM that a module imports, or names of which it imports."""
    for statement in ast.walk(tree):
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import | ast.ImportFrom) else []
        if isinstance(statement, ast.ImportFrom):
            parts = [f"{statement.module}.{name}" for name in names if not statement.level]
            names = [part if sources.module(part) else str(statement.module) for part in parts]
        yield from (name for name in names if name.partition(".")[0] == "vllm")


def test_only_public_modules_of_vllm_are_imported_and_all_of_the_list():
    imported = {
        file: set(modules_imported(ast.parse(file.read_text())))
        for file in SERVER.rglob("*.py")
        if not str(file.relative_to(SERVER)).startswith(EXEMPT)
    }
    assert not {file: found for file, modules in imported.items() if (found := modules - PUBLIC)}
    assert set().union(*imported.values()) == PUBLIC
