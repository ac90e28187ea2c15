"""What a worker packs of a comparison, and what an API server unpacks."""

import numpy as np
import pytest
import torch

from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.references.worker.kl_divergence import Comparison
from scoremode_server.references.worker.packing import ComparedRows

CPU = torch.device("cpu")


def reduced(tokens: list[list[int]], logprobs: list[list[float]], ranks: list[int]) -> ReducedRows:
    """Rows whose sums are 1 above a maximum of 0, so that their logits are logprobs."""
    rows = len(tokens)
    return ReducedRows(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logprobs),
        torch.zeros(rows),
        torch.ones(rows, dtype=torch.float64),
        torch.tensor(ranks, dtype=torch.int32),
    )


COMPARISON = Comparison(
    kld=torch.tensor([0.25, 0.5]),
    reverse_kld=torch.tensor([0.75, float("inf")]),
    acceptance=torch.tensor([0.875, 0.625]),
    served=reduced([[7, 5, 9], [8, 8, 1]], [[-3.0, -0.5, -1.5], [-0.25, -0.25, -2.0]], [40, 1]),
    reference=reduced([[7, 9, 7], [8, 2, 3]], [[-2.0, -1.0, -2.0], [-4.0, -0.125, -3.0]], [2, 11]),
)
"""Two rows with the top 2 tokens of both sides."""


def test_a_packed_comparison_has_the_columns_that_the_class_describes():
    tokens, logprobs, ranks = ComparedRows.pack(COMPARISON)
    # The target and the top of the served model, those of the reference, the reference's rank.
    assert tokens.tolist() == [[7, 5, 9, 7, 9, 7, 2], [8, 8, 1, 8, 2, 3, 11]]
    assert (tokens.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    # Of the same tokens; then both divergences and the acceptance.
    assert logprobs.tolist() == [
        [-3.0, -0.5, -1.5, -2.0, -1.0, -2.0, 0.25, 0.75, 0.875],
        [-0.25, -0.25, -2.0, -4.0, -0.125, -3.0, 0.5, float("inf"), 0.625],
    ]
    assert ranks.tolist() == [40, 1]


def test_unpacking_names_every_column():
    tokens, logprobs, ranks = (column.numpy() for column in ComparedRows.pack(COMPARISON))
    rows = ComparedRows.unpack((tokens, logprobs, ranks))
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


@pytest.mark.parametrize(("num_top", "num_compared"), [(0, 1), (1, 1), (2, 2)])
def test_missing_rows_are_nan_and_as_wide_as_compared_ones(num_top: int, num_compared: int):
    """A comparison has the top token even if none is wanted."""
    sides = (ReducedRows.empty(3, num_compared, CPU) for _ in range(2))
    compared = ComparedRows.pack(Comparison(torch.zeros(3), torch.zeros(3), torch.zeros(3), *sides))
    missing = ComparedRows.pack_missing(3, num_top, CPU)
    assert [(each.shape, each.dtype) for each in missing] == [(each.shape, each.dtype) for each in compared]
    assert missing[1].isnan().all()
