"""Arrays in an answer: in base64, with their shape where they are tables, or as JSON numbers."""

import base64
from typing import Any

import numpy as np

from scoremode_server.rows import json_logprobs


def as_base64(values: np.ndarray) -> str:
    """The bytes of an array, whose dtype says their order."""
    return base64.b64encode(values.tobytes()).decode("ascii")


def top_arrays(token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The likeliest tokens [n, k] of each position, as `TopLogprobArrays`."""
    return {
        "shape": list(token_ids.shape),
        "token_ids": as_base64(token_ids.astype("<i4")),
        "logprobs": as_base64(logprobs.astype("<f4")),
    }


def top_entries(token_ids: np.ndarray, logprobs: np.ndarray) -> list[list[dict[str, Any]]]:
    """The likeliest tokens [n, k] of each position, as a `TopLogprob` each."""
    return [
        [{"token_id": token_id, "logprob": logprob} for token_id, logprob in zip(*row, strict=True)]
        for row in zip(token_ids.tolist(), json_logprobs(logprobs).tolist(), strict=True)
    ]
