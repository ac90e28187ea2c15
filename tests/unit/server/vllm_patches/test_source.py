"""The source text of names, found without importing them."""

from pathlib import Path

import pytest

from scoremode_server.vllm_patches.versions import Sources

ENGINE = '''\
import torch
from vllm.core import Base as Renamed
from numpy import asarray

FIRST, (SECOND, THIRD) = 1, (2, 3)
table = {}
table[FIRST] = 5

class Engine(Renamed):
    count: int = 0

    @classmethod
    @torch.no_grad()
    def make(cls):
        """A string
that is indented less."""
        return cls()

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        pass

    class Inner:
        def run(self): return 2

try:
    import fast
except ImportError:
    fast = None
'''
FOUND = {
    "THIRD": "FIRST, (SECOND, THIRD) = 1, (2, 3)",
    "table": "table = {}",
    "Engine.count": "count: int = 0",
    "Engine.make": "@classmethod\n@torch.no_grad()\n"
    'def make(cls):\n    """A string\nthat is indented less."""\n    return cls()',
    "Engine.size": "@property\ndef size(self):\n    return 1\n@size.setter\ndef size(self, value):\n    pass",
    "Engine.*": "Engine(Renamed)\nInner\ncount\nmake\nsize",
    "Engine.Inner.run": "def run(self): return 2",
    "fast": "fast = None",
    # Imported, and defined elsewhere; or nowhere.
    **dict.fromkeys(("torch", "asarray", "missing", "Engine.missing", "Missing.*")),
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A package with one module, `vllm.engine`, and the name `VERSION` of its own."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("VERSION = 1\nfrom vllm.engine import Engine\n")
    (tmp_path / "vllm/engine.py").write_text(ENGINE)
    return Sources(tmp_path)


def test_a_definition_is_found_with_its_decorators_and_without_its_indentation(sources: Sources):
    assert {name: sources.segment(f"vllm.engine:{name}") for name in FOUND} == FOUND


def test_a_package_is_a_module_and_what_it_imports_is_not_defined_there(sources: Sources):
    found = [sources.segment(name) for name in ("vllm:VERSION", "vllm:Engine", "vllm.missing:Engine")]
    assert found == ["VERSION = 1", None, None]
