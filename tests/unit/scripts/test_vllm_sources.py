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

FILES = {
    "vllm/__init__.py": "from .engine import Engine as LLM\nfrom .nowhere import nothing\n",
    "vllm/engine.py": ENGINE,
    "vllm/core/__init__.py": "from .deep import Deep\nfrom vllm.loop import lost\n\nclass Base:\n    size = 2\n",
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
    ("name", "text"),
    [
        ("vllm:LLM.count", "count: int = 0"),
        ("vllm.engine:Renamed.size", "size = 2"),
        ("vllm.engine:Deep.level", "level = 3"),
        ("vllm.core.deep:CHUNK", "CHUNK = 1024"),
        ("vllm.engine:asarray", "from numpy import asarray"),
        *((f"vllm.engine:{gone}", None) for gone in ("Engine.missing", "missing", "torch", "zeros")),
        *((gone, None) for gone in ("vllm.missing:Engine", "vllm:nothing", "vllm.loop:lost", "vllm.core:lost")),
    ],
)
def test_an_imported_name_is_followed_to_its_definition(sources: Sources, name: str, text: str | None):
    assert segment(sources, name) == text
