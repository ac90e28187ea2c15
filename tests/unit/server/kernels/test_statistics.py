"""Entropy and spread of whole distributions next to their definitions in float64."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.reduced_rows import Shard
from scoremode_server.kernels.working_memory import TILING
from scoremode_server.worker.sinks import Statistics
from tests.unit.server.kernels.row_checks import DTYPES, in_parts, random_logits

pytestmark = pytest.mark.usefixtures("kernels")

TILE = TILING.lanes * TILING.width
SINK = Statistics(["entropy", "std_logprob"])


def statistics(
    logits: torch.Tensor, limit: int = 1000, shard: Shard | None = None, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Statistics` of each row, on the device of the logits only."""
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    sinks = [partial(SINK.compute, pieces=())]
    with torch.device("cpu"):
        columns = fused_logprobs.compute(
            targets, logits, lambda rows: rows, 0, limit, shard, temperature=temperature, sinks=sinks
        )
    return columns["entropy"], columns["std_logprob"]


def check(logits: torch.Tensor, found: Sequence[torch.Tensor], temperature: float = 1.0) -> None:
    """Compare with the definition, where 0 times an infinite logprob is 0. A deviation is the root of a difference of
    squares, whose float32 sums have relative errors of some 1e-7 each: near 0 its error is absolute."""
    logprobs = (logits.double() / temperature).log_softmax(1)
    p = logprobs.exp()
    held = torch.where(p == 0, 0.0, logprobs)
    entropy = -(p * held).sum(1)
    deviation = (p * (held + entropy[:, None]).square()).sum(1).sqrt()
    for column, expected in zip(found, (entropy, deviation), strict=True):
        assert column.dtype == torch.float32
        torch.testing.assert_close(column.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_by_hand():
    """p = (3/4, 1/4): H = ln 4 - 3/4 ln 3, and ln p is ln 3 apart, so its deviation is sqrt(3)/4 ln 3."""
    [entropy], [deviation] = statistics(torch.tensor([[3.0, 1.0]]).log())
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-6)
    assert deviation.item() == pytest.approx(math.sqrt(3) / 4 * math.log(3), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 129, TILE, 2 * TILE + 1])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_random_rows(dtype: torch.dtype, vocab: int, temperature: float):
    logits = random_logits(5, vocab, vocab + 63, dtype, seed=vocab)
    logits[1] *= 10
    logits[2] *= 0.01
    check(logits, statistics(logits, 2, temperature=temperature), temperature)


def test_excluded_tokens_add_nothing_and_nan_is_never_a_number():
    logits = random_logits(6, 300, 300, torch.float32, seed=1)
    logits[0, ::2] = -math.inf
    logits[1, 1:] = -math.inf
    logits[2] = 0.0
    logits[3, 7] = torch.finfo(torch.float32).min
    check(logits[:4], statistics(logits[:4]))
    logits[4, 9], logits[5] = math.nan, -math.inf
    assert all(column[4:].isnan().all() for column in statistics(logits))


def test_parts_of_a_vocabulary_give_what_the_whole_gives():
    logits = random_logits(6, 1000, 1000, torch.bfloat16, seed=2)
    logits[1, 500:] = -math.inf
    ranks, _ = in_parts([334, 334, 1000], [logits], lambda shard, part: statistics(part, 4, shard, 0.5))
    for found in ranks:
        check(logits, found, 0.5)


def test_what_is_not_a_statistic_is_refused():
    for wrong in (["mean"], [], ["entropy", "entropy"], "entropy", None):
        with pytest.raises(ValueError, match="statistics must be one or more of entropy, std_logprob"):
            Statistics(wrong)
