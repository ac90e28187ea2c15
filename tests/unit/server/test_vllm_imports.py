"""What the server may import from vLLM, and where.

Private parts of vLLM are for `vllm_patches`, and for `completions`, which extends vLLM's handlers. All other modules
keep to the list below. Ruff checks that no other module uses a private attribute (SLF001).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm

from scoremode_server.vllm_patches.source import Sources

SERVER = Path(__file__).parents[3] / "server" / "scoremode_server"
EXEMPT = ("vllm_patches", "completions")

ENTRYPOINTS = {
    # What a route of an endpoint plugin needs to behave as vLLM's own do.
    *("openai.completion.api_router", "openai.completion.protocol", "serve", "serve.engine.protocol"),
    *("scale_out.token_in_token_out.api_router", "scale_out.token_in_token_out.protocol"),
    *("serve.utils.api_utils", "serve.utils.orca_metrics"),
    # What `scoremode serve` runs.
    *("cli.serve", "common.startup"),
}
PARTS = {
    # What vLLM documents for users of the engine, and the types of its parts.
    *("config", "engine.protocol", "envs", "inputs", "logger", "logprobs", "outputs", "platforms", "renderers"),
    *("renderers.base", "sampling_params", "tokenizers", "tokenizers.detokenizer_utils", "utils"),
    *("utils.argparse_utils", "v1.engine.exceptions"),
}
PUBLIC = {"vllm", *(f"vllm.{name}" for name in PARTS), *(f"vllm.entrypoints.{name}" for name in ENTRYPOINTS)}

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


def test_only_public_modules_of_vllm_are_imported_and_all_of_the_list():
    code = "import vllm.a as b, numpy\nfrom . import vllm\ndef f():\n    from vllm.v1 import outputs\n"
    code += "    from vllm import SamplingParams, envs\n    from vllm.v1.outputs import LogprobsTensors"
    assert sorted(modules_imported(ast.parse(code))) == [
        *("vllm", "vllm.a", "vllm.envs", "vllm.v1.outputs", "vllm.v1.outputs")
    ]
    paths = {file.relative_to(SERVER): file for file in SERVER.rglob("*.py")}
    imported = {
        path: set(modules_imported(ast.parse(file.read_text())))
        for path, file in paths.items()
        if path.parts[0] not in EXEMPT
    }
    assert not {path: found for path, modules in imported.items() if (found := modules - PUBLIC)}
    assert set().union(*imported.values()) == PUBLIC
