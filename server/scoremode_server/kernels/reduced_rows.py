"""Reduces rows of logits to the few numbers that logprobs need. Tensor-parallel ranks, each with a part of the
vocabulary, exchange reduced rows and combine them here.

Ranks exchange float32 only, because vLLM's collectives on a CPU take only floats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """Rows of logits, each reduced to a few numbers.

    Attributes:
        tokens: [rows, 1 + k] int32: the target, then the tokens of the k highest logits, in descending order of logits.
            If several tokens share the highest logit, the one with the lowest id comes first, as in greedy decoding.
        logits: [rows, 1 + k] float32, the logits of these tokens.
        maxima: [rows] float32, the highest logit m.
        sums: [rows] float64, the sum of exp((logit - m) / T) over the row, at a temperature T; NaN if the row has a
            NaN.
        ranks: [rows] int32, how many logits are at least as high as the target's.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def empty(cls, rows: int, num_top: int, device: torch.device) -> "ReducedRows":
        tokens = torch.empty((rows, 1 + num_top), dtype=torch.int32, device=device)
        logits, maxima = torch.empty_like(tokens, dtype=torch.float32), tokens.new_empty(rows, dtype=torch.float32)
        return cls(tokens, logits, maxima, tokens.new_empty(rows, dtype=torch.float64), tokens.new_empty(rows))

    def __getitem__(self, rows: slice) -> "ReducedRows":
        """Views of some rows."""
        return ReducedRows(self.tokens[rows], self.logits[rows], self.maxima[rows], self.sums[rows], self.ranks[rows])

    @property
    def num_top(self) -> int:
        return int(self.tokens.shape[1]) - 1

    def logprobs(self, temperature: float = 1.0, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logprobs [rows, 1 + k] float32, in nats, of `tokens`; or of other entries of the rows, given their
        `logits` [rows, any]. The formula (logit - m) / T - log(sum) rounds less than logit / T - logsumexp. The result
        is rounded to float32 once. `temperature` must be the T of `sums`."""
        below = (self.logits if logits is None else logits).double().sub_(self.maxima[:, None]).div_(temperature)
        return below.sub_(self.sums.log()[:, None]).float()


@dataclass(frozen=True, slots=True, eq=False)
class JoinedRows:
    """Reads tensors [rows, ...] of one dtype as if they were joined, a slice at a time. Slices are copied to `device`
    if it is given; tensors on the host should then be pinned."""

    parts: Sequence[torch.Tensor]
    device: torch.device | None = None

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Some rows: a view if one tensor has them all."""
        pieces, start = [], 0
        for part in self.parts:
            piece = part[max(rows.start - start, 0) : max(rows.stop - start, 0)]
            if len(piece):
                pieces.append(piece if self.device is None else piece.to(self.device, non_blocking=True))
            start += len(part)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of the vocabulary."""

    first: int
    """Token id of this rank's first column."""
    columns: int
    """How many columns are tokens; later columns are padding."""
    group: Any
    """vLLM's group of the ranks that share the vocabulary."""


def true_on_every_rank(group: Any, answers: list[bool]) -> list[bool]:
    """Tell which of the answers are true on every rank."""
    if group.world_size == 1:
        return answers
    on_ranks = _gathered(group, torch.tensor(answers, dtype=torch.float32, device=group.device))
    return cast(list[bool], on_ranks.bool().all(0).tolist())


def share_targets(group: Any, rows: ReducedRows) -> None:
    """Give each rank the targets' logits. Before, all ranks have -inf except the rank whose part has the target."""
    rows.logits[:, 0] = highest(group, rows.logits[:, 0].contiguous())


def highest(group: Any, logits: torch.Tensor) -> torch.Tensor:
    """Compute the maximum of each entry over all ranks."""
    return _gathered(group, logits).amax(0)


def gather_rows(group: Any, rows: ReducedRows, temperature: float = 1.0) -> ReducedRows:
    """Combine the reduced rows of all ranks into those of the whole vocabulary."""
    parts = rows.tokens, rows.logits, rows.maxima[:, None], rows.sums[:, None], rows.ranks[:, None]
    words = [part.view(torch.float32) for part in parts]
    # The bits of all parts are sent in one tensor.
    gathered = _gathered(group, torch.cat(words, 1)).split([part.shape[1] for part in words], 2)
    tokens, logits, maxima, sums, ranks = (
        bits.contiguous().view(part.dtype) for bits, part in zip(gathered, parts, strict=True)
    )
    maximum = maxima.amax(0)
    # A part without columns, or with only -inf, has a maximum of -inf and a sum of 0.
    scales = torch.exp((maxima.double() - maximum.masked_fill(maximum == -math.inf, 0.0)).div_(temperature))
    top_tokens, top_logits = (values[:, :, 1:].transpose(0, 1).flatten(1) for values in (tokens, logits))
    # Tokens of probability 0 come before the fillers of parts that have fewer than k tokens.
    comparable = top_logits.clamp(min=LOWEST).masked_fill_(top_tokens < 0, -math.inf)
    order = comparable.topk(rows.num_top).indices
    chosen = top_tokens.gather(1, order)
    if rows.num_top:
        # Ranks hold ascending parts of the vocabulary, and each puts the lowest of its tokens with the highest logit
        # first. So the first maximum is the lowest token.
        put_first(chosen, top_tokens.gather(1, comparable.argmax(1, keepdim=True)))
    return ReducedRows(
        tokens=torch.cat((tokens[0, :, :1], chosen), 1),
        logits=torch.cat((logits[0, :, :1], top_logits.gather(1, order)), 1),
        maxima=maximum[:, 0],
        sums=(sums * scales).sum(0)[:, 0],
        ranks=ranks.sum(0, dtype=torch.int32)[:, 0],
    )


def put_first(top_tokens: torch.Tensor, first: torch.Tensor) -> None:
    """Put the token `first` [rows, 1] at the front of each row's top tokens [rows, k]. It swaps places with the token
    there, whose logit is equal. If `first` is not among the top tokens, it replaces the token there."""
    replaced = top_tokens[:, :1].clone()
    top_tokens.copy_(torch.where(top_tokens == first, replaced, top_tokens))
    top_tokens[:, :1] = first


def add_up(group: Any, sums: torch.Tensor) -> torch.Tensor:
    """Add up the sums [rows, n] float32 of all ranks."""
    return _gathered(group, sums).sum(0, dtype=torch.float64).float()


def _gathered(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from all ranks, [ranks, ...]."""
    return cast(torch.Tensor, group.all_gather(tensor, 0).view(group.world_size, *tensor.shape))
