"""Prompt logprobs from one pass over the logits, in chunks of rows, and what sinks compute from the same logits.

One kernel reads a row of logits once and leaves a few numbers; what follows is small and done for all rows together.

Under tensor parallelism a rank keeps to its own part of the vocabulary. It has to know the targets' logits, to count
what is as high, so these are exchanged for each chunk, and the few numbers of all rows at the end.
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
    """Rows whose logits are in memory, for a sink to compute its columns from.

    Attributes:
        place: these rows among those of the call.
        logits: [rows, at least `num_columns`], of the model's dtype: this rank's part of the vocabulary, and padding.
        first: the token of the first column of logits.
        num_columns: columns of logits that are tokens.
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
        """[rows, m] float32, nats, of tokens [m] or [rows, m]. Every rank must call this."""
        taken = torch_kernels.take(self.logits, tokens.expand(len(self.logits), -1), self.first, self.num_columns)
        if self.shard is not None:
            taken = highest(self.shard.group, taken)
        return self.scores.logprobs(self.temperature, taken)

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        """Add up what each rank has summed over its part of the vocabulary, [rows, n] float32. Every rank must call
        this."""
        return sums if self.shard is None else add_up(self.shard.group, sums)


SinkFunction = Callable[[Chunk], Mapping[str, torch.Tensor]]
"""Columns by name, [rows] or [rows, width], of a chunk."""


def kernels_for(device: torch.device, num_top: int = 0) -> Any:
    """The module with the kernels for a device: Triton's for a GPU, PyTorch's elsewhere, where there is no Triton, and
    for more top tokens than Triton's find."""
    if device.type != "cuda" or num_top > MAX_TOP:
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
    sinks: Sequence[SinkFunction] = (),
) -> dict[str, torch.Tensor]:
    """Score the target of every row, of which there is at least one.

    Args:
        targets: [rows] tokens.
        hidden_states: [rows, hidden].
        logits_fn: [rows, hidden] -> logits [rows, vocabulary].
        num_top: number of top tokens.
        limit: rows whose logits are held at a time.
        shard: whose logits `logits_fn` gives, where it does not give all; every rank of its group must come here at the
            same time, with the same rows, `num_top`, `limit` and sinks.
        candidates: [rows, m] int32, more tokens of the vocabulary that are to be scored in each row.
        temperature: T of the distribution, the softmax of logits / T. Ranks do not depend on it.
        sinks: compute more columns of each chunk.

    Returns:
        The columns of `rows.score_columns`: token_ids [rows, 1 + m + num_top] int32, logprobs in nats, float32, NaN
        where a row has a NaN; ranks of the targets [rows] int32: how many logits are as high, so 1 for the highest.
        Then those of the sinks.
    """
    kernels = kernels_for(targets.device, num_top)
    reduced = ReducedRows.empty(len(targets), num_top, targets.device)
    chosen, further = [], list[dict[str, torch.Tensor]]()
    for part in in_chunks(len(targets), limit):
        logits = logits_fn(hidden_states[part])
        first, columns = (shard.first, shard.columns) if shard else (0, logits.shape[-1])
        scores = reduced[part]
        kernels.take_targets(logits, targets[part], first, columns, scores)
        if shard:
            share_targets(shard.group, scores)
        kernels.reduce_rows(logits, first, columns, scores, temperature)
        if candidates is not None:
            chosen.append(torch_kernels.take(logits, candidates[part], first, columns))
        if sinks:
            whole = gather_rows(shard.group, scores, temperature) if shard else scores
            chunk = Chunk(part, logits, first, columns, targets[part], whole, temperature, shard)
            further.append({name: column for sink in sinks for name, column in sink(chunk).items()})
            del chunk
        # The next chunk's are computed where these were.
        del logits
    if shard:
        reduced = gather_rows(shard.group, reduced, temperature)
    token_ids, logprobs = reduced.tokens, reduced.logprobs(temperature)
    if candidates is not None:
        taken = torch.cat(chosen)
        taken = reduced.logprobs(temperature, highest(shard.group, taken) if shard else taken)
        token_ids = torch.cat((token_ids[:, :1], candidates, token_ids[:, 1:]), 1)
        logprobs = torch.cat((logprobs[:, :1], taken, logprobs[:, 1:]), 1)
    scored = {"token_ids": token_ids, "logprobs": logprobs, "ranks": reduced.ranks}
    names = further[0] if further else ()
    return scored | {name: torch.cat([columns[name] for columns in further]) for name in names}
