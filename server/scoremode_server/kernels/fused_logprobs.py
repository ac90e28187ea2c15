"""Prompt logprobs from one pass over the logits, in chunks of rows.

One kernel reads a row of logits once and leaves a few numbers; what follows is small and done for all rows together.

Under tensor parallelism a rank keeps to its own part of the vocabulary. It has to know the targets' logits, to count
what is as high, so these are exchanged for each chunk, and the few numbers of all rows at the end.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scoremode_server.kernels import torch_kernels
from scoremode_server.kernels.reduced_rows import JoinedRows, ReducedRows, Shard, gather_rows, highest, share_targets
from scoremode_server.kernels.working_memory import MAX_TOP, TILE_ROWS

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


def kernels_for(device: torch.device) -> Any:
    """The module with the kernels for a device: Triton's for a GPU, PyTorch's elsewhere, where there is no Triton."""
    if device.type != "cuda":
        return torch_kernels
    from scoremode_server.kernels import triton_kernels

    return triton_kernels


def in_chunks(rows: int, limit: int) -> Iterator[slice]:
    """Divide `rows` (at least one) into chunks of at most `limit`: as few as can be, of equal size in whole tiles, so
    that none is left whose projection reads all weights for a few rows."""
    share = math.ceil(rows / math.ceil(rows / limit))
    step = min(limit, math.ceil(share / TILE_ROWS) * TILE_ROWS)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def compute(
    targets: torch.Tensor,
    hidden_states: torch.Tensor | JoinedRows,
    logits_fn: LogitsFunction,
    num_top: int,
    limit: int,
    shard: Shard | None = None,
    candidates: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score the target of every row, of which there is at least one.

    Args:
        targets: [rows] tokens.
        hidden_states: [rows, hidden].
        logits_fn: [rows, hidden] -> logits [rows, vocabulary].
        num_top: number of top tokens.
        limit: rows whose logits are held at a time.
        shard: whose logits `logits_fn` gives, where it does not give all; every rank of its group must come here at the
            same time, with the same rows, `num_top` and `limit`.
        candidates: [rows, m] int32, more tokens of the vocabulary that are to be scored in each row.
        temperature: T of the distribution, the softmax of logits / T. Ranks do not depend on it.

    Returns:
        Tokens [rows, 1 + m + num_top] int32: the target, the candidates, the top tokens; their logprobs in nats,
        float32, NaN where a row has a NaN; ranks of the targets [rows] int32: how many logits are as high, so 1 for the
        highest.
    """
    kernels = kernels_for(targets.device) if num_top <= MAX_TOP else torch_kernels
    reduced = ReducedRows.empty(len(targets), num_top, targets.device)
    chosen = []
    for part in in_chunks(len(targets), limit):
        logits = logits_fn(hidden_states[part])
        first, columns = (shard.first, shard.columns) if shard else (0, logits.shape[-1])
        chunk = reduced[part]
        kernels.take_targets(logits, targets[part], first, columns, chunk)
        if shard:
            share_targets(shard.group, chunk)
        kernels.reduce_rows(logits, first, columns, chunk, temperature)
        if candidates is not None:
            chosen.append(torch_kernels.take(logits, candidates[part], first, columns))
        # The next chunk's are computed where these were.
        del logits
    if shard:
        reduced = gather_rows(shard.group, reduced, temperature)
    logprobs = reduced.logprobs(temperature)
    if candidates is None:
        return reduced.tokens, logprobs, reduced.ranks
    taken = torch.cat(chosen)
    taken = reduced.logprobs(temperature, highest(shard.group, taken) if shard else taken)
    return (
        torch.cat((reduced.tokens[:, :1], candidates, reduced.tokens[:, 1:]), 1),
        torch.cat((logprobs[:, :1], taken, logprobs[:, 1:]), 1),
        reduced.ranks,
    )
