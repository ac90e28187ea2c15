"""The result of a comparison, as it crosses from a worker to an API server."""

from dataclasses import dataclass

import numpy as np
import torch

from scoremode.kld import KldPositions
from scoremode_server.references.worker.kl_divergence import Comparison
from scoremode_server.rows import Columns

PackedRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The arrays of vLLM's prompt logprobs: tokens [rows, any] int32, logprobs [rows, any] float32, ranks [rows] int32."""

_NUM_DIVERGENCES = 3


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """The figures of a window's targets, and the top tokens of both sides.

    They cross packed in the arrays of vLLM's prompt logprobs. Tokens: the target and the top k of the served model, of
    the reference, and the reference's rank of the target. Logprobs: of the same tokens, then KL(reference||served),
    KL(served||reference), acceptance. Ranks: the served model's. There is always a top token.
    """

    positions: KldPositions
    top: dict[str, tuple[np.ndarray, np.ndarray]]
    """Token ids and logprobs [rows, k] of the top k of each side, by the names of their fields."""

    @staticmethod
    def pack(comparison: Comparison) -> PackedRows:
        """The rows of a comparison."""
        served, reference = comparison.served, comparison.reference
        divergences = torch.stack((comparison.kld, comparison.reverse_kld, comparison.acceptance), 1)
        return (
            torch.cat((served.tokens, reference.tokens, reference.ranks[:, None]), 1),
            torch.cat((served.logprobs(), reference.logprobs(), divergences), 1),
            served.ranks,
        )

    @staticmethod
    def pack_missing(num_rows: int, num_top: int, device: torch.device) -> PackedRows:
        """Make rows with NaN instead of each logprob."""
        num_columns = 2 * (1 + max(1, num_top))
        return (
            torch.full((num_rows, num_columns + 1), -1, dtype=torch.int32, device=device),
            torch.full((num_rows, num_columns + _NUM_DIVERGENCES), torch.nan, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    @classmethod
    def unpack(cls, columns: Columns) -> "ComparedRows":
        """The rows that a worker packed."""
        token_ids, logprobs, ranks = columns
        width = token_ids.shape[1] // 2
        sides = {"top_logprobs": slice(1, width), "reference_top_logprobs": slice(width + 1, 2 * width)}
        kld, reverse_kld, acceptance = logprobs[:, -_NUM_DIVERGENCES:].T
        positions = KldPositions(
            token_ids=token_ids[:, 0],
            kld=kld,
            reverse_kld=reverse_kld,
            acceptance=acceptance,
            logprobs=logprobs[:, 0],
            reference_logprobs=logprobs[:, width],
            ranks=ranks,
            reference_ranks=token_ids[:, -1],
            top_token_ids=token_ids[:, 1],
            reference_top_token_ids=token_ids[:, width + 1],
            reference_confidence=np.exp(logprobs[:, width + 1]),
        )
        return cls(positions, {name: (token_ids[:, side], logprobs[:, side]) for name, side in sides.items()})
