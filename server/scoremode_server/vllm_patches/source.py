"""The source text of names in vLLM, found in its files without importing them.

Standard library only: the plugin uses it on vLLM versions that it does not know, and `scripts/check_vllm.py` on wheels
that are not installed.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ReadFile = Callable[[str], str | None]
"""From a path such as `vllm/envs.py` to the file's text; None where there is no such file."""

PACKAGE = "vllm"


def files_beside(package: Path) -> ReadFile:
    """Reads the files of an installed package, given its folder."""

    def read(path: str) -> str | None:
        file = package.parent / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed module. `path` is its dotted name, `is_package` whether it is an `__init__.py`."""

    path: str
    is_package: bool
    text: str
    tree: ast.Module

    def segment(self, nodes: list[ast.stmt]) -> str:
        """The statements as written, decorators included, without the indentation of where they stand."""
        return "\n".join(self._statement(node) for node in nodes)

    def _statement(self, node: ast.stmt) -> str:
        # Lines as the parser counts them: `splitlines` knows more line ends.
        lines = self.text.split("\n")[_first_line(node) - 1 : node.end_lineno]
        # Not `textwrap.dedent`: lines of a string may be indented less than the statement.
        indentation = lines[0][: node.col_offset]
        return "\n".join(line.removeprefix(indentation) for line in lines)

    def absolute(self, statement: ast.ImportFrom) -> str:
        """The dotted name of the module that a `from` statement of this one names."""
        if not statement.level:
            return statement.module or ""
        parts = self.path.split(".")
        package = parts[: len(parts) - statement.level + self.is_package]
        return ".".join([*package, *filter(None, [statement.module])])


class Sources:
    """vLLM's source files."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self.module = cache(self._parse)

    def _parse(self, path: str) -> Module | None:
        """The module of a dotted name, or None where there is none."""
        stem = path.replace(".", "/")
        for file, is_package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            if (text := self._read(file)) is not None:
                return Module(path, is_package, text, ast.parse(text))
        return None

    def segment(self, module: str, name: str) -> str | None:
        """The source text that defines a dotted name, such as `Class.method`, in a module; None where there is none.

        A name that is defined several times, as overloads and properties are, has all definitions. A name that the
        module imports from vLLM is followed to its definition; of one from elsewhere, the import is the text.
        """
        return self._find(module, name, frozenset())

    def _find(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> str | None:
        found = self.module(module)
        if found is None or (module, name) in seen:
            return None
        if nodes := _definitions(found.tree.body, name.split(".")):
            return found.segment(nodes)
        for statement, original in _imports_of(found, name):
            source = found.absolute(statement)
            if source.partition(".")[0] == PACKAGE:
                segment = self._find(source, original, seen | {(module, name)})
            else:
                segment = None if statement.names[0].name == "*" else found.segment([statement])
            if segment is not None:
                return segment
        return None


def digest(segment: str | None) -> str | None:
    """A short hash of a source text, as it stands in the manifest; None of a name that is gone."""
    return None if segment is None else hashlib.sha256(segment.encode()).hexdigest()[:16]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, those in the branches of `if`, `try` and `with` among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def _definitions(body: list[ast.stmt], names: list[str]) -> list[ast.stmt]:
    """The statements that define a dotted name in a scope."""
    defining = [statement for statement in statements(body) if names[0] in _defined_names(statement)]
    if len(names) == 1:
        return defining
    return [
        found for scope in defining if isinstance(scope, ast.ClassDef) for found in _definitions(scope.body, names[1:])
    ]


def _defined_names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            return {node.id for node in names if isinstance(node.ctx, ast.Store)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def _imports_of(module: Module, name: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """(a `from` statement that may bring a dotted name, the dotted name where it comes from)."""
    first, _, rest = name.partition(".")
    for statement in statements(module.tree.body):
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if alias.name == "*":
                yield statement, name
            elif (alias.asname or alias.name) == first:
                yield statement, ".".join(filter(None, [alias.name, rest]))


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
