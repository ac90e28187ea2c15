"""Roughly how long a sweep takes on this machine, before its first server has started: from the size of the first
model, the length of the text, and how fast this machine multiplies."""

import json
import shutil
import time
from math import inf
from pathlib import Path

import numpy as np

from scoremode.runs import Corpus
from scoremode.sweep.plan import SweepPlan
from scoremode.windows import resolve_stride

_START_SECONDS = 60.0
"""Until a server of a small model is ready."""
_BYTES_PER_TOKEN = 4
"""Of English text."""
_GPU_FLOPS = 5e13
"""A tenth of an H200's: the estimate is then mostly of the servers' starts."""
_CPU_SHARE = 0.5
"""How much of a matrix product's speed a model's forward pass has, which 135M parameters had on two cores."""


def estimated_seconds(plan: SweepPlan, folder: Path, corpus: Corpus) -> float | None:
    """The seconds of a sweep that serves all models; None where the first one's size is not known, which is not in a
    local folder, or a lane's speed, other than prefill's."""
    model = plan.models[0].model
    weights = [*(folder / model).glob("*.safetensors")] if model is not None else []
    if not weights or plan.lane != "prefill":
        return None
    # Two operations for each weight, of two bytes.
    token_flops = sum(file.stat().st_size for file in weights)
    num_passes = len(plan.models) + 1 + plan.floor
    flops = _GPU_FLOPS if shutil.which("nvidia-smi") else _CPU_SHARE * _cpu_flops()
    pass_seconds = _num_tokens(plan, corpus) * token_flops / flops
    return len(plan.models) * _START_SECONDS + num_passes * pass_seconds


def _num_tokens(plan: SweepPlan, corpus: Corpus) -> float:
    """About how many tokens the windows of a text have."""
    texts = corpus.documents or [corpus.text, *(json.dumps(each.messages) for each in corpus.conversations)]
    windows = plan.window_settings
    num_tokens = min(sum(map(len, texts)) / _BYTES_PER_TOKEN, windows.get("max_tokens") or inf)
    context = windows.get("context_length")
    if context is None:
        return num_tokens
    return num_tokens * context / resolve_stride(windows["method"], context, windows.get("stride"))


def _cpu_flops() -> float:
    """Operations per second of a matrix product in float32 on all cores."""
    matrix = np.ones((1024, 1024), np.float32)
    fastest = inf
    for _ in range(5):
        started = time.perf_counter()
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - started)
    return float(2 * len(matrix) ** 3 / fastest)
