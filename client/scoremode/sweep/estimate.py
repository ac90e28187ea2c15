"""Estimates how long a sweep takes on this machine, before its first server starts. The estimate uses the size of the
first model, the length of the text, and without a GPU the measured speed of a matrix product."""

import json
import shutil
import timeit
from math import inf
from pathlib import Path

import numpy as np

from scoremode.runs import Corpus
from scoremode.sweep.memory import model_folder, weight_bytes
from scoremode.sweep.plan import SweepPlan
from scoremode.windows import resolve_stride

_START_SECONDS = 60.0
"""Seconds that a server takes to start with a small model."""
_BYTES_PER_TOKEN = 4
"""Average length of a token in English text."""
_GPU_FLOPS = 5e13
"""Speed assumed for a GPU: a twentieth of an H200's peak in bfloat16. Most of the estimate is then server starts."""
_CPU_SHARE = 0.5
"""Speed of a forward pass divided by that of a matrix product, measured with 135M parameters on two cores."""


def estimated_seconds(
    plan: SweepPlan, folder: Path, corpus: Corpus, prompts: Corpus | None, num_starts: int
) -> float | None:
    """Estimate the seconds of a sweep that serves all models and generates answers of the maximum length. Servers that
    start at once are one of `num_starts`.

    None if the size of the first model on disk is not known, or if the lane is not prefill, because only prefill's
    speed is known.
    """
    # A token takes two operations per weight, and a weight has two bytes: files have as many bytes as operations.
    token_flops = weight_bytes(model_folder(plan.models[0].model or "", folder))
    if not token_flops or plan.lane != "prefill":
        return None
    flops = _GPU_FLOPS if shutil.which("nvidia-smi") else _CPU_SHARE * _cpu_flops()
    num_passes = sum(entry.repeats for entry in plan.models) + 1 + plan.floor
    num_tokens = _num_tokens(plan, corpus) + (0 if prompts is None else prompts.num_rows * plan.max_new_tokens)
    return num_starts * _START_SECONDS + num_passes * num_tokens * token_flops / flops


def _num_tokens(plan: SweepPlan, corpus: Corpus) -> float:
    """Estimate how many tokens the windows of a text have in total."""
    texts = corpus.documents or [corpus.text, *(json.dumps(chat.messages) for chat in corpus.conversations)]
    windows = plan.window_settings
    num_tokens = min(sum(map(len, texts)) / _BYTES_PER_TOKEN, windows.get("max_tokens") or inf)
    context = windows.get("context_length") or 2048
    return num_tokens * context / resolve_stride(windows["method"], context, windows.get("stride"))


def _cpu_flops() -> float:
    """Operations per second of a matrix product in float32 on all cores."""
    matrix = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
