"""Reduced rows beside float64, and rows to reduce."""

import torch

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = 4e-6
"""A few roundings of float32 at the size of a logit."""


def check(logits: torch.Tensor, targets: torch.Tensor, scores: Scores) -> None:
    """Against float64; which of equal logits are in the top k is left open, that they are different tokens is not."""
    tokens, logprobs, ranks = scores
    exact = logits.double()
    actual = exact.gather(1, targets[:, None])
    assert (tokens.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert torch.equal(tokens[:, 0].long(), targets)
    assert torch.equal(ranks.long(), (exact >= actual).sum(1))
    top = tokens[:, 1:].long()
    assert torch.equal(exact.gather(1, top), exact.topk(top.shape[1]).values)
    assert all(len(set(row)) == len(row) for row in top.tolist())
    expected = exact.log_softmax(-1).gather(1, tokens.long())
    assert torch.allclose(logprobs.double(), expected, rtol=2e-7, atol=TOLERANCE, equal_nan=True)


def random_logits(rows: int, vocab: int, stride: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, vocab] beside columns of padding that would win if they counted."""
    logits = torch.full((rows, stride), 1000.0)
    logits[:, :vocab] = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.to(dtype)[:, :vocab]
