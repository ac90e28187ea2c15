"""The source text of names that modules import from one another, found without importing them."""

from pathlib import Path

import pytest

from scoremode_server.vllm_patches.source import Sources
from vllm_sources import segment

ENGINE = """\
import torch
from vllm.core import Base as Renamed
from .core import *

if TYPE_CHECKING:
    from numpy import asarray

CHUNK = 1024

class Engine(Renamed):
    count: int = 0

def run():
    from numpy import zeros
"""

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


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("vllm", "LLM.count", "count: int = 0"),
        ("vllm.engine", "Renamed.base", "def base(self): ..."),
        ("vllm.engine", "Deep.level", "level = 3"),
        ("vllm.core.deep", "CHUNK", "CHUNK = 1024"),
        ("vllm.engine", "asarray", "from numpy import asarray"),
    ],
)
def test_an_imported_name_is_followed_to_its_definition(sources: Sources, module: str, name: str, text: str):
    assert segment(sources, f"{module}:{name}") == text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.engine", "Engine.missing"),
        ("vllm.engine", "missing"),
        ("vllm.engine", "torch"),
        ("vllm.engine", "zeros"),
        ("vllm.missing", "Engine"),
        ("vllm", "nothing"),
        ("vllm.loop", "lost"),
        ("vllm.core", "lost"),
    ],
)
def test_what_is_gone_has_no_text(sources: Sources, module: str, name: str):
    assert segment(sources, f"{module}:{name}") is None
