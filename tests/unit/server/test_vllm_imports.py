"""What the server may import from vLLM, and where.

Private parts of vLLM are for `vllm_patches`, and for `completions`, which extends vLLM's handler. All other modules
keep to the list below. Ruff checks that no other module uses a private attribute (SLF001).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from scoremode_server.vllm_patches.source import Sources

SERVER = Path(__file__).parents[3] / "server" / "scoremode_server"
EXEMPT = ("vllm_patches", "completions")

PUBLIC = {
    # What vLLM documents for users of the engine, and the types of its parts.
    "vllm",
    "vllm.config",
    "vllm.engine.protocol",
    "vllm.envs",
    "vllm.inputs",
    "vllm.logger",
    "vllm.logprobs",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.renderers",
    "vllm.renderers.base",
    "vllm.sampling_params",
    "vllm.tokenizers",
    "vllm.tokenizers.detokenizer_utils",
    "vllm.utils",
    "vllm.utils.argparse_utils",
    "vllm.v1.engine.exceptions",
    # What a route of an endpoint plugin needs to behave as vLLM's own do.
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol",
    "vllm.entrypoints.serve",
    "vllm.entrypoints.serve.engine.protocol",
    "vllm.entrypoints.serve.utils.api_utils",
    "vllm.entrypoints.serve.utils.orca_metrics",
    # What `scoremode serve` runs.
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.common.startup",
}

sources = Sources(Path(vllm.__file__).parents[1])


def modules_imported(tree: ast.Module) -> Iterator[str]:
    """The modules of vLLM that a module imports, or names of which it imports."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            found = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            found = [name if sources.module(name) else statement.module or "" for name in names]
        else:
            continue
        yield from (name for name in found if name.partition(".")[0] == "vllm")


def imported_by_path() -> dict[str, set[str]]:
    """Path in the package -> modules of vLLM, for every module that has to keep to the list."""
    paths = {file.relative_to(SERVER): file for file in SERVER.rglob("*.py")}
    return {
        str(path): set(modules_imported(ast.parse(file.read_text())))
        for path, file in paths.items()
        if path.parts[0] not in EXEMPT
    }


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import vllm.v1.outputs as o", ["vllm.v1.outputs"]),
        ("from vllm.v1.outputs import LogprobsTensors", ["vllm.v1.outputs"]),
        ("from vllm import SamplingParams, envs", ["vllm", "vllm.envs"]),
        ("def f():\n    from vllm.v1 import outputs", ["vllm.v1.outputs"]),
        ("import numpy\nfrom . import vllm", []),
    ],
)
def test_imports_are_found_in_any_form(code: str, modules: list[str]):
    assert list(modules_imported(ast.parse(code))) == modules


def test_only_public_modules_of_vllm_are_imported():
    outside = {path: found for path, modules in imported_by_path().items() if (found := modules - PUBLIC)}
    assert not outside


def test_the_list_has_no_module_that_nobody_imports():
    assert set().union(*imported_by_path().values()) >= PUBLIC
