"""The source text of names, found without importing them."""

from collections.abc import Mapping

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

CORE = """\
from vllm.loop import lost
from vllm.core.deep import Deep

class Base:
    def base(self): ...
"""

FILES = {
    "vllm/__init__.py": "from .engine import Engine as LLM\nfrom .nowhere import nothing\n",
    "vllm/engine.py": ENGINE,
    "vllm/core/__init__.py": CORE,
    "vllm/core/deep.py": "from ..engine import CHUNK\n\nclass Deep:\n    level = 3\n",
    "vllm/loop.py": "from vllm.loop import lost\n",
}


def find(module: str, name: str, files: Mapping[str, str] = FILES) -> str | None:
    return Sources(files.get).segment(module, name)


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
        ("asarray", "from numpy import asarray"),
    ],
)
def test_a_definition_is_found_with_its_decorators_and_without_its_indentation(name: str, text: str):
    assert find("vllm.engine", name) == text


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("vllm", "LLM.count", "count: int = 0"),
        ("vllm.engine", "Renamed.base", "def base(self): ..."),
        ("vllm.engine", "Deep.level", "level = 3"),
        ("vllm.core.deep", "CHUNK", "CHUNK = 1024"),
    ],
)
def test_an_imported_name_is_followed_to_its_definition(module: str, name: str, text: str):
    assert find(module, name) == text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.engine", "Engine.missing"),
        ("vllm.engine", "missing"),
        ("vllm.engine", "torch"),
        ("vllm.missing", "Engine"),
        ("vllm", "nothing"),
        ("vllm.loop", "lost"),
        ("vllm.core", "lost"),
    ],
)
def test_what_is_gone_has_no_text(module: str, name: str):
    assert find(module, name) is None
