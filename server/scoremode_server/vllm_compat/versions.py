"""Decides which versions of vLLM Scoremode runs on: those whose private parts have the source text that was reviewed.

`private.toml` lists the private parts that Scoremode uses. For every supported version, `manifest.json` has a hash of
the source text of each, and of every name that Scoremode imports from vLLM. `scripts/check_vllm.py VERSION --write`
writes `manifest.json`. Source text is found without importing vLLM, because its version may be unknown, or it may be in
a wheel.
"""

import ast
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

SUPPORTED = ">=0.32,<0.34"
SUPPORTED_SERIES = ("0.32.", "0.33.")
HASHES_FILE = Path(__file__).with_name("manifest.json")
PRIVATE_FILE = Path(__file__).with_name("private.toml")

Hashes = dict[str, dict[str, str | None]]
"""Version -> "module:name" -> hash of the source text, None where that version has no such name."""


def recorded_hashes() -> Hashes:
    hashes: Hashes = json.loads(HASHES_FILE.read_text(encoding="utf-8"))
    return hashes


PRIVATE: dict[str, str] = {
    f"{module}:{name}": why
    for module, names in tomllib.loads(PRIVATE_FILE.read_text(encoding="utf-8")).items()
    for name, why in names.items()
}
"""The entries of `private.toml`: "module:name" -> what is done with it. Names are dotted inside the module, such as
`Class.method`; `Class.*` is the set of a class's names."""


def require_supported() -> None:
    """RuntimeError if Scoremode does not run on the installed vLLM, or if its API server is the one in Rust. Scoremode
    runs on each release in the manifest, and on other releases in the supported range if all private parts have the
    same source text as in a release in the manifest."""
    import vllm

    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise RuntimeError("unset VLLM_USE_RUST_FRONTEND: vLLM's API server in Rust has none of Scoremode's routes")
    hashes = recorded_hashes()
    # A build for one platform adds only a local part to the version, as in 0.32.0+cpu.
    version = str(vllm.__version__).partition("+")[0]
    if version in hashes:
        return
    refusal = f"Scoremode runs on vLLM {' and '.join(hashes)} (range: {SUPPORTED}), but found vLLM {vllm.__version__}"
    if not version.startswith(SUPPORTED_SERIES):
        raise RuntimeError(f"{refusal}. Install one of these: pip install 'vllm{SUPPORTED}'")
    sources = Sources(Path(vllm.__file__).parents[1])
    installed = {key: digest(sources.segment(key)) for key in PRIVATE}
    differences = ([key for key in installed if installed[key] != recorded.get(key)] for recorded in hashes.values())
    # Compare with the most similar release in the manifest.
    if changes := min(differences, key=len):
        raise RuntimeError(f"{refusal}, which differs from these in what Scoremode patches: {', '.join(changes)}")


class Sources:
    """The modules under a folder, which may be inside a wheel. Each is parsed once."""

    def __init__(self, root: Traversable) -> None:
        self.module = cache(lambda path: _parse(root, path))

    def segment(self, key: str) -> str | None:
        """The source text that defines "module:name", such as "vllm.outputs:RequestOutput.add"; None if no statement
        does.

        If a name is defined several times, as overloads and properties are, the text has all definitions. Imports do
        not count. For "module:Class.*": the class's bases and the names of its public attributes, one per line.
        """
        module, _, name = key.partition(":")
        parsed = self.module(module)
        if parsed is None:
            return None
        text, tree = parsed
        if name.endswith(".*"):
            owners = _definitions(tree, *name.split(".")[:-1])
            return "\n".join(_interface(owner) for owner in owners if isinstance(owner, ast.ClassDef)) or None
        return "\n".join(as_written(text, node) for node in _definitions(tree, *name.split("."))) or None


def digest(segment: str | None) -> str | None:
    """The short hash of a source text that the manifest has; None for a name that no longer exists."""
    return None if segment is None else hashlib.sha256(segment.encode()).hexdigest()[:16]


def as_written(text: str, node: ast.stmt) -> str:
    """A statement's source text, decorators included, without its indentation."""
    first = [*getattr(node, "decorator_list", []), node][0]
    # Count lines as the parser does: `splitlines` knows more line ends.
    lines = text.split("\n")[first.lineno - 1 : node.end_lineno]
    # `textwrap.dedent` would fail, because lines of a string may be indented less than the statement.
    return "\n".join(line.removeprefix(" " * node.col_offset) for line in lines)


def _parse(root: Traversable, path: str) -> tuple[str, ast.Module] | None:
    """The source text and the syntax tree of a module, given its dotted name; None if there is no such module."""
    files = [root / f"{path.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)
    return None if text is None else (text, ast.parse(text))


def _definitions(scope: ast.AST, name: str, *inner: str) -> list[ast.stmt]:
    """The statements that define a name in a scope, or an inner name in the class of that name."""
    statements = [statement for defined, statement in _defined_names(scope) if defined == name]
    if not inner:
        return statements
    return [node for owner in statements if isinstance(owner, ast.ClassDef) for node in _definitions(owner, *inner)]


def _interface(owner: ast.ClassDef) -> str:
    """The bases of a class, and its public names."""
    names = sorted({name for name, _ in _defined_names(owner) if not name.startswith("_")})
    return "\n".join([f"{owner.name}({', '.join(map(ast.unparse, owner.bases))})", *names])


def _defined_names(scope: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """(a name, the statement that defines it) in a scope, the branches of `if`, `try` and the like included."""
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Assign(targets=targets):
                names = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
                yield from ((part.id, node) for part in names if isinstance(part.ctx, ast.Store))
            case _:
                yield from _defined_names(node)
