"""A run as `ppl-client` wrote it: the JSON, and the values of every token beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class RunFile:
    """One run. Arrays are over its n targets, in the order of windows."""

    path: Path
    label: str
    """What it is called in tables and plots; no two runs of a comparison share one."""
    kind: Literal["perplexity", "kld"]
    record: Mapping[str, Any]
    """The whole JSON."""
    window_sizes: NDArray[np.int32]
    """[windows]; their sum is n."""
    token_ids: NDArray[np.int32]
    nlls: NDArray[np.float64]
    """[n], nats."""
    ranks: NDArray[np.int32] | None
    """[n], 1 for the likeliest."""
    kld: NDArray[np.float64] | None
    """[n], nats, from the reference; this and the next four are there for kind `kld` alone."""
    reference_nlls: NDArray[np.float64] | None
    top_token_ids: NDArray[np.int32] | None
    """[n], the likeliest token."""
    reference_top_token_ids: NDArray[np.int32] | None
    reference_confidence: NDArray[np.float64] | None
    """[n], the reference's probability of its likeliest token."""
    token_texts: Mapping[int, str]
    """The text of every token id that occurs in the arrays; empty for a run that has none."""
