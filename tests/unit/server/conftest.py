"""The kernels under test: PyTorch's on the CPU, and Triton's.

Triton's are compiled where there is CUDA. Elsewhere they need Triton's interpreter, which a process is in as a whole or
not at all: `test_interpreter.py` starts processes that are.
"""

import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from scoremode_server.kernels import fused_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = torch.cuda.is_available() and not INTERPRETED

collect_ignore = ["kernels/test_interpreter.py"] if INTERPRETED or COMPILED else []


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """One implementation, and its device, on which the test makes its tensors."""
    found = fused_logprobs.kernels_for(torch.device("cuda" if request.param == "triton" else "cpu"))
    ours = [module for name, module in sys.modules.items() if name.startswith("scoremode_server.")]
    for module in (each for each in ours if hasattr(each, "kernels_for")):
        monkeypatch.setattr(module, "kernels_for", lambda *arguments: found)
    with torch.device("cuda" if request.param == "triton" and COMPILED else "cpu"):
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove Triton's kernels from a process that cannot run them."""
    if not (INTERPRETED or COMPILED):
        items[:] = [item for item in items if "kernels" not in item.fixturenames or "interpreter" not in item.keywords]


@pytest.fixture(autouse=True)
def _interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        kernels = fused_logprobs.kernels_for(torch.device("cuda"))
        monkeypatch.setattr(fused_logprobs, "kernels_for", lambda *arguments: kernels)
