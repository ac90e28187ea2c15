"""What an API server unpacks of a comparison; `test_sinks.py` compares what a worker packs."""

import numpy as np

from scoremode_server.references.worker.packing import ComparedRows

# Two rows with the top 2 tokens of both sides: the target and the top of the served model, those of the reference, and
# the reference's rank.
TOKENS = [[7, 5, 9, 7, 9, 7, 2], [8, 8, 1, 8, 2, 3, 11]]
# Of the same tokens; then both divergences and the acceptance.
LOGPROBS = [
    [-3.0, -0.5, -1.5, -2.0, -1.0, -2.0, 0.25, 0.75, 0.875],
    [-0.25, -0.25, -2.0, -4.0, -0.125, -3.0, 0.5, np.inf, 0.625],
]


def test_unpacking_names_every_column():
    rows = ComparedRows.unpack((np.array(TOKENS, np.int32), np.array(LOGPROBS, np.float32), np.array([40, 1])))
    expected = {
        "token_ids": [7, 8],
        "kld": [0.25, 0.5],
        "reverse_kld": [0.75, np.inf],
        "acceptance": [0.875, 0.625],
        "logprobs": [-3.0, -0.25],
        "reference_logprobs": [-2.0, -4.0],
        "ranks": [40, 1],
        "reference_ranks": [2, 11],
        "top_token_ids": [5, 8],
        "reference_top_token_ids": [9, 2],
        "reference_confidence": np.exp(np.array([-1.0, -0.125], np.float32)).tolist(),
    }
    assert {name: getattr(rows.positions, name).tolist() for name in expected} == expected
    assert {name: (ids.tolist(), values.tolist()) for name, (ids, values) in rows.top.items()} == {
        "top_logprobs": ([[5, 9], [8, 1]], [[-0.5, -1.5], [-0.25, -2.0]]),
        "reference_top_logprobs": ([[9, 7], [2, 3]], [[-1.0, -2.0], [-0.125, -3.0]]),
    }
