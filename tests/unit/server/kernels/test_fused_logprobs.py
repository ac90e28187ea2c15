"""Chosen tokens and temperatures beside float64 formulas: from PyTorch here.

`test_triton_kernels.py` runs this module again, in Triton's interpreter.
"""

from itertools import pairwise

import pytest
import torch
from row_checks import DTYPES, random_logits

from scoremode_server.kernels import fused_logprobs, tensor_parallel, torch_kernels
from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.kernels.tensor_parallel import Shard

ROWS, VOCAB = 5, 300
TOLERANCE = 4e-6
"""A few roundings of float32 at the size of a logit, as in `row_checks`."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [rows, vocabulary], targets [rows], candidates [rows, 4], one of which comes twice."""
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(ROWS, VOCAB, VOCAB, dtype, seed=3)
    candidates = torch.randint(VOCAB, (ROWS, 4), generator=generator, dtype=torch.int32)
    candidates[:, 1] = candidates[:, 0]
    return logits, torch.randint(VOCAB, (ROWS,), generator=generator), candidates


@pytest.mark.parametrize("temperature", [1.0, 0.25, 0.7, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 20, 256])
def test_rows_equal_float64(dtype: torch.dtype, temperature: float, num_top: int):
    logits, targets, candidates = inputs(dtype)
    tokens, logprobs, ranks = fused_logprobs.compute(
        targets, logits, lambda rows: rows, num_top, 2, candidates=candidates, temperature=temperature
    )
    exact = (logits.double() / temperature).log_softmax(-1)
    assert tokens.shape == logprobs.shape == (ROWS, 1 + 4 + num_top)
    assert torch.equal(tokens[:, 0].long(), targets)
    assert torch.equal(tokens[:, 1:5], candidates)
    assert torch.equal(logits.gather(1, tokens[:, 5:].long()), logits.topk(num_top).values)
    tolerance = TOLERANCE / min(1.0, temperature)
    assert torch.allclose(logprobs.double(), exact.gather(1, tokens.long()), rtol=2e-7, atol=tolerance)
    assert torch.equal(ranks.long(), (logits >= logits.gather(1, targets[:, None])).sum(1))


def test_without_a_temperature_the_bits_are_those_of_temperature_one():
    logits, targets, _ = inputs()
    plain = fused_logprobs.compute(targets, logits, lambda rows: rows, 3, 2)
    one = fused_logprobs.compute(targets, logits, lambda rows: rows, 3, 2, temperature=1.0)
    assert all(torch.equal(*pair) for pair in zip(plain, one, strict=True))


def test_excluded_candidates_and_rows_with_a_nan():
    logits, targets, candidates = inputs()
    logits[0, candidates[0, 2]] = -torch.inf
    logits[1, 7] = torch.nan
    targets[0] = (candidates[0, 2] + 1) % VOCAB
    _, logprobs, _ = fused_logprobs.compute(
        targets, logits, lambda rows: rows, 0, 9, candidates=candidates, temperature=0.5
    )
    assert logprobs[0, 3] == -torch.inf
    assert logprobs[0, 0].isfinite()
    assert logprobs[1].isnan().all()


def test_a_vocabulary_in_parts():
    """Parts merge at a temperature, and each candidate is held by one of them."""
    logits, targets, candidates = inputs()
    ends = (0, 130, 130, VOCAB)
    shards = [Shard(first, end - first, None) for first, end in pairwise(ends)]
    taken = torch.stack(
        [
            torch_kernels.take(logits[:, shard.first :], candidates, shard.first, shard.columns)
            for shard in shards
            if shard.columns
        ]
    ).amax(0)
    assert torch.equal(taken, logits.gather(1, candidates.long()))
    kernels = fused_logprobs.kernels_for(torch.device("cpu"))
    reduced = []
    for shard in shards:
        part = logits[:, shard.first : shard.first + shard.columns].contiguous()
        rows = ReducedRows.empty(ROWS, 2, torch.device("cpu"))
        whole = logits.gather(1, targets[:, None])[:, 0]
        rows.tokens[:, 0], rows.logits[:, 0] = targets, whole
        if not shard.columns:
            part = logits.new_zeros((ROWS, 8))
        kernels.reduce_rows(part, shard.first, shard.columns, rows, 0.6)
        reduced.append(rows)
    merged = tensor_parallel.merge(reduced, 0.6)
    exact = (logits.double() / 0.6).log_softmax(-1)
    found = merged.logprobs(0.6).double()
    assert torch.allclose(found, exact.gather(1, merged.tokens.long()), rtol=2e-7, atol=TOLERANCE / 0.6)
