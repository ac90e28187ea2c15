"""Triton's kernels where a process is in Triton's interpreter."""

import os

import pytest
import torch

from scoremode_server.kernels import fused_logprobs


@pytest.fixture(autouse=True)
def _interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        kernels = fused_logprobs.kernels_for(torch.device("cuda"))
        monkeypatch.setattr(fused_logprobs, "kernels_for", lambda device: kernels)
