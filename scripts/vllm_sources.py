"""The source text of names in vLLM, by whichever of its modules they are imported from."""

import ast
from collections.abc import Iterator

from scoremode_server.vllm_compat.versions import Sources, as_written

PACKAGE = "vllm"


def segment(sources: Sources, key: str, seen: frozenset[str] = frozenset()) -> str | None:
    """The source text of "module:name", where the name may be dotted, such as `Class.method`; None where it is gone.

    A name that the module imports from vLLM is followed to its definition, and `seen` is the way there; of one from
    elsewhere, the import is the text.
    """
    module, _, name = key.partition(":")
    found = sources.module(module)
    if found is None or key in seen:
        return None
    (whole, tree), text = found, sources.segment(key)
    for statement, original in _imports_of(tree, name):
        if text is not None:
            break
        source = _absolute(sources, module, statement)
        if source.partition(".")[0] == PACKAGE:
            text = segment(sources, f"{source}:{original}", seen | {key})
        elif statement.names[0].name != "*":
            text = as_written(whole, statement)
    return text


def _absolute(sources: Sources, module: str, statement: ast.ImportFrom) -> str:
    """The dotted name of the module that a `from` statement of a module names."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    # One dot names the folder of the file: for a package, that is the package itself.
    is_package = sources.module(f"{module}.__init__") is not None
    package = parts[: len(parts) - statement.level + is_package]
    return ".".join([*package, *filter(None, [statement.module])])


def _imports_of(tree: ast.Module, name: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """(a `from` statement that may bring a dotted name, the dotted name where it comes from)."""
    first, _, rest = name.partition(".")
    for statement in _from_statements(tree):
        for alias in statement.names:
            if alias.name == "*":
                yield statement, name
            elif (alias.asname or alias.name) == first:
                yield statement, ".".join(filter(None, [alias.name, rest]))


def _from_statements(scope: ast.AST) -> Iterator[ast.ImportFrom]:
    """The statements that bring names into a module, also in the branches of `if` and `try`, but not in functions and
    classes."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _from_statements(node)
