"""The source text of names, found without importing them."""

import zipfile
from pathlib import Path

import pytest

from scoremode_server.vllm_patches.source import Sources

ENGINE = '''\
import torch
from vllm.core import Base as Renamed
from .core import *
from numpy import asarray

CHUNK = 1024
FIRST, (SECOND, THIRD) = 1, (2, 3)
table = {}
table[CHUNK] = 5

class Engine(Renamed):
    count: int = 0

    # Not part of any method.
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
else:
    def speed():
        return fast.speed

if True:
    ONE_LINE = 1; OTHER = 2
'''


@pytest.fixture(params=["folder", "wheel"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Sources:
    """A package with one module, `vllm.engine`, and the name `VERSION` of its own."""
    files = {"vllm/__init__.py": "VERSION = 1\nfrom vllm.engine import Engine\n", "vllm/engine.py": ENGINE}
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    if request.param == "wheel":
        return Sources(zipfile.Path(tmp_path / "vllm.whl"))
    with zipfile.ZipFile(tmp_path / "vllm.whl") as archive:
        archive.extractall(tmp_path)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CHUNK", "CHUNK = 1024"),
        ("THIRD", "FIRST, (SECOND, THIRD) = 1, (2, 3)"),
        ("table", "table = {}"),
        ("Engine.count", "count: int = 0"),
        (
            "Engine.make",
            "@classmethod\n@torch.no_grad()\n"
            'def make(cls):\n    """A string\nthat is indented less."""\n    return cls()',
        ),
        (
            "Engine.size",
            "@property\ndef size(self):\n    return 1\n@size.setter\ndef size(self, value):\n    pass",
        ),
        ("Engine.Inner.run", "def run(self): return 2"),
        ("speed", "def speed():\n    return fast.speed"),
        ("fast", "fast = None"),
    ],
)
def test_a_definition_is_found_with_its_decorators_and_without_its_indentation(sources: Sources, name: str, text: str):
    assert sources.segment(f"vllm.engine:{name}") == text


def test_a_package_is_a_module(sources: Sources):
    assert sources.segment("vllm:VERSION") == "VERSION = 1"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.engine", "Engine.missing"),
        ("vllm.engine", "missing"),
        ("vllm.engine", "torch"),
        ("vllm.missing", "Engine"),
        # Imported, and defined elsewhere.
        ("vllm", "Engine"),
        ("vllm.engine", "asarray"),
    ],
)
def test_undefined_names_have_no_text(sources: Sources, module: str, name: str):
    assert sources.segment(f"{module}:{name}") is None
