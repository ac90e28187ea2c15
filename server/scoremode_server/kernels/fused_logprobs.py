"""Computes prompt logprobs from logits, in chunks of rows. Sinks, which compute more columns, get the same logits.

One kernel reads a row of logits once and reduces it to a few numbers. The rest is small and done for all rows together.

Under tensor parallelism each process reduces its own part of the vocabulary. To find a target's rank it needs the
target's logit, so these logits are exchanged for each chunk. The reduced numbers of all rows are exchanged at the end.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scoremode_server.kernels import torch_kernels
from scoremode_server.kernels.reduced_rows import (
    JoinedRows,
    ReducedRows,
    Shard,
    add_up,
    gather_rows,
    highest,
    share_targets,
)
from scoremode_server.kernels.working_memory import MAX_TOP, TILE_ROWS

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows whose logits are in memory. Sinks compute their columns from a chunk.

    Attributes:
        place: where these rows are among all rows of the call of `compute`.
        logits: [rows, at least `num_columns`], in the model's dtype: this rank's part of the vocabulary, then padding.
        first: token id of the first column of logits.
        num_columns: how many columns of logits are tokens.
        targets: [rows] int64.
        scores: maxima, sums and the target's logit over the whole vocabulary, the same on every rank.
        temperature: T of the distribution, the softmax of logits / T.
        shard: this rank's part of the vocabulary; None if it has all of it.
    """

    place: slice
    logits: torch.Tensor
    first: int
    num_columns: int
    targets: torch.Tensor
    scores: ReducedRows
    temperature: float
    shard: Shard | None

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute logprobs [rows, m] float32, in nats, of tokens [m] or [rows, m]. Every rank must call this."""
        logits = torch_kernels.take(self.logits, tokens.expand(len(self.logits), -1), self.first, self.num_columns)
        if self.shard is not None:
            logits = highest(self.shard.group, logits)
        return self.scores.logprobs(self.temperature, logits)

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        """Add up over all ranks the sums [rows, n] float32 that each has computed over its part of the vocabulary.
        Every rank must call this."""
        return sums if self.shard is None else add_up(self.shard.group, sums)


SinkFunction = Callable[[Chunk], Mapping[str, torch.Tensor]]
"""Computes columns of a chunk by name, [rows] or [rows, width]."""


def kernels_for(device: torch.device, num_top: int = 0) -> Any:
    """The module with the kernels for a device: Triton's for a GPU; PyTorch's elsewhere, and for more than `MAX_TOP`
    top tokens, which Triton's cannot find."""
    if device.type != "cuda" or num_top > MAX_TOP:
        return torch_kernels
    from scoremode_server.kernels import triton_kernels

    return triton_kernels


def in_chunks(rows: int, limit: int) -> Iterator[slice]:
    """Divide `rows` (at least one) into as few chunks of at most `limit` as possible. All but the
    last have the same size: an equal share, rounded up to whole tiles within `limit`. Chunks of `limit` could leave a
    few rows for the last one, which reads all weights of the LM head."""
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
    sinks: Sequence[SinkFunction] = (),
) -> dict[str, torch.Tensor]:
    """Score the target of each row. There must be at least one row.

    Args:
        targets: [rows] tokens.
        hidden_states: [rows, hidden].
        logits_fn: [rows, hidden] -> logits [rows, vocabulary].
        num_top: number of top tokens.
        limit: how many rows' logits may be in memory at once.
        shard: the part of the vocabulary that `logits_fn` returns; None for all. Every rank of its group must call this
            at the same time, with the same rows, `num_top`, `limit`, candidates and sinks.
        candidates: [rows, m] int32, more tokens to score in each row.
        temperature: T of the distribution, the softmax of logits / T. The ranks of tokens do not depend on it.
        sinks: compute more columns of each chunk.

    Returns:
        The columns of `rows.score_columns`, and those of the sinks. token_ids: [rows, 1 + m + num_top] int32. logprobs:
        float32, in nats; NaN if the row has a NaN. ranks: [rows] int32, how many logits are at least as high as the
        target's, so 1 for the highest.
    """
    kernels = kernels_for(targets.device, num_top)
    reduced = ReducedRows.empty(len(targets), num_top, targets.device)
    candidate_logits, sink_columns = [], list[dict[str, torch.Tensor]]()
    for part in in_chunks(len(targets), limit):
        logits = logits_fn(hidden_states[part])
        first, columns = (shard.first, shard.columns) if shard else (0, logits.shape[-1])
        scores = reduced[part]
        kernels.take_targets(logits, targets[part], first, columns, scores)
        if shard:
            share_targets(shard.group, scores)
        kernels.reduce_rows(logits, first, columns, scores, temperature)
        if candidates is not None:
            candidate_logits.append(torch_kernels.take(logits, candidates[part], first, columns))
        if sinks:
            whole = gather_rows(shard.group, scores, temperature) if shard else scores
            chunk = Chunk(part, logits, first, columns, targets[part], whole, temperature, shard)
            sink_columns.append({name: column for sink in sinks for name, column in sink(chunk).items()})
            del chunk
        # Free the logits: the next chunk's use the same memory.
        del logits
    if shard:
        reduced = gather_rows(shard.group, reduced, temperature)
    token_ids, logprobs = reduced.tokens, reduced.logprobs(temperature)
    if candidates is not None:
        own = torch.cat(candidate_logits)
        own = reduced.logprobs(temperature, highest(shard.group, own) if shard else own)
        token_ids = torch.cat((token_ids[:, :1], candidates, token_ids[:, 1:]), 1)
        logprobs = torch.cat((logprobs[:, :1], own, logprobs[:, 1:]), 1)
    scored = {"token_ids": token_ids, "logprobs": logprobs, "ranks": reduced.ranks}
    names = sink_columns[0] if sink_columns else ()
    return scored | {name: torch.cat([columns[name] for columns in sink_columns]) for name in names}
