"""Rows to reduce, float64 to compare with, and threads instead of ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from scoremode_server.kernels.reduced_rows import Shard

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = 4e-6
"""A few roundings of float32 at the size of a logit."""
PADDING = 1000.0
"""The value that fills padding: it would win if it counted."""


def check(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scores: Scores,
    candidates: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> None:
    """Compare with float64. Of equal logits any may be in the top k, each once; the first is `torch.argmax`'s."""
    tokens, logprobs, ranks = scores
    exact = logits.double()
    actual = exact.gather(1, targets[:, None])
    assert (tokens.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    named = targets[:, None] if candidates is None else torch.cat((targets[:, None], candidates), 1)
    assert torch.equal(tokens[:, : named.shape[1]].long(), named)
    assert torch.equal(ranks.long(), (exact >= actual).sum(1))
    top = tokens[:, named.shape[1] :].long()
    assert torch.equal(exact.gather(1, top), exact.topk(top.shape[1]).values)
    assert all(len(set(row)) == len(row) for row in top.tolist())
    assert not top.shape[1] or torch.equal(top[:, 0], exact.argmax(1))
    expected = (exact / temperature).log_softmax(-1).gather(1, tokens.long())
    tolerance = TOLERANCE / min(1.0, temperature)
    assert torch.allclose(logprobs.double(), expected, rtol=2e-7, atol=tolerance, equal_nan=True)


def randn(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device())


def random_logits(rows: int, vocab: int, stride: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, vocab], with columns of padding between the rows."""
    logits = torch.full((rows, stride), PADDING)
    logits[:, :vocab] = randn(rows, vocab, seed=seed) * 4
    return logits.to(dtype)[:, :vocab]


class Ranks:
    """Threads instead of ranks, each at work only while it holds the lock: Triton's interpreter has one state."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls = [0] * world_size
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(world_size)
        self._given: list[torch.Tensor] = [torch.empty(0)] * world_size

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """The results of `work(group)` on every rank, with what is used of vLLM's group of ranks."""

        def one(rank: int) -> Any:
            group = SimpleNamespace(world_size=self.world_size, rank_in_group=rank)
            group.all_gather = lambda tensor, dim: self._exchange(rank, tensor)
            try:
                with self._lock:
                    return work(group)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(one, range(self.world_size)))

    def _exchange(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.calls[rank] += 1
        self._given[rank] = tensor.clone()
        self._meet()
        gathered = torch.cat(self._given)
        self._meet()
        return gathered

    def _meet(self) -> None:
        self._lock.release()
        try:
            self._barrier.wait()
        finally:
            self._lock.acquire()


def in_parts(ends: list[int], sides: list[torch.Tensor], work: Callable[..., Any]) -> tuple[list[Any], list[int]]:
    """Call `work(shard, *sides)` with the columns up to each of `ends` on a rank of their own, padded.

    Returns what each rank returned, and how often each exchanged.
    """

    def one(rank: Any) -> Any:
        first, end = list(pairwise([0, *ends]))[rank.rank_in_group]
        parts = [
            torch.cat((side[:, first:end], side.new_full((len(side), padding), PADDING)), 1)
            for side, padding in zip(sides, (5, 9), strict=False)
        ]
        return work(Shard(first, end - first, rank), *parts)

    ranks = Ranks(len(ends))
    return ranks.run(one), ranks.calls
