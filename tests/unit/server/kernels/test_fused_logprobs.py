"""Logprobs of targets, chosen tokens and the top k next to float64, at temperatures and with a vocabulary in parts."""

import math
import os
from types import ModuleType

import pytest
import torch

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.fused_logprobs import MAX_TOP
from scoremode_server.kernels.reduced_rows import ReducedRows, Shard
from scoremode_server.kernels.working_memory import TILING, Tiling
from tests.unit.server.kernels.row_checks import DTYPES, Scores, check, in_parts, random_logits

pytestmark = pytest.mark.usefixtures("kernels")

TILE = TILING.lanes * TILING.width
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def scored(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_top: int,
    limit: int = 1000,
    shard: Shard | None = None,
    candidates: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Scores:
    """`compute` with an identity for its projection, on the device of the logits only."""
    with torch.device("cpu"):
        columns = fused_logprobs.compute(
            targets,
            logits,
            lambda rows: rows,
            num_top,
            limit,
            shard,
            candidates=candidates,
            temperature=temperature,
        )
    return columns["token_ids"], columns["logprobs"], columns["ranks"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "stride"), [(1, 1), (7, 64), (129, 192), (TILE, TILE), (2 * TILE + 1, 2 * TILE + 64)]
)
def test_random_rows(dtype: torch.dtype, vocab: int, stride: int):
    logits = random_logits(3, vocab, stride, dtype, seed=vocab)
    targets = torch.tensor([0, vocab - 1, vocab // 2])
    for num_top in {0, 1, min(20, vocab), min(MAX_TOP, vocab)}:
        check(logits, targets, scored(logits, targets, num_top))


@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_chosen_tokens_and_temperatures(dtype: torch.dtype, temperature: float, num_top: int):
    logits = random_logits(5, 300, 300, dtype, seed=3)
    targets = torch.tensor([0, 299, 100, 31, 212])
    candidates = (torch.tensor([[17], [250], [0], [31], [299]]) + torch.tensor([0, 0, 1, 40])).int() % 300
    logits[1, 251] = -math.inf
    check(logits, targets, scored(logits, targets, num_top, 2, None, candidates, temperature), candidates, temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors_have_no_direction(kernels: ModuleType, dtype: torch.dtype):
    """PyTorch's float32 log-softmax on a CPU is 8e-6 nats too high in every row, which no larger sample cancels."""
    rows = 100 if INTERPRETED else 2_000
    logits = random_logits(rows, 8192, 8192, dtype, seed=4)
    targets = torch.arange(rows) % 8192
    # Some are nearly certain, where a float32 step is smallest.
    logits[torch.arange(0, rows, 3), targets[::3]] = 20.0
    found = scored(logits, targets, 0)[1][:, 0]
    exact = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    error = found.double() - exact
    assert error.mean().abs() <= 1e-7
    if found.device.type == "cpu" and not INTERPRETED:
        step = torch.nextafter(exact.float().abs(), torch.tensor(math.inf)) - exact.float().abs()
        assert (error.abs() <= step).all()


@pytest.mark.parametrize("kernels", [pytest.param("triton", marks=pytest.mark.interpreter)], indirect=True)
@pytest.mark.parametrize("tiling", [Tiling(16, 4, 1), Tiling(64, 8, 2), Tiling(32, 1, 1)])
def test_many_tiles_to_a_row_and_few_entries_to_a_tile(kernels: ModuleType, tiling: Tiling):
    logits = random_logits(5, 777, 800, torch.bfloat16, seed=3)
    targets = torch.tensor([0, 776, 100, 31, 512])
    for num_top, temperature in ((0, 1.0), (1, 0.5), (9, 1.0)):
        reduced = ReducedRows.empty(5, num_top, logits.device)
        kernels.take_targets(logits, targets, 0, 777, reduced)
        kernels.reduce_rows(logits, 0, 777, reduced, temperature, tiling)
        check(logits, targets, (reduced.tokens, reduced.logprobs(temperature), reduced.ranks), temperature=temperature)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_ranks_count_all_equal_logits(num_top: int):
    values = torch.tensor([-3.0, 0.5, 2.0])
    logits = values[(random_logits(8, 9001, 9001, torch.float32, seed=1).abs() * 9).long() % 3].bfloat16()
    logits[0] = 1.5
    targets = torch.arange(8) * 1100
    check(logits, targets, scored(logits, targets, num_top))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [1, 20])
def test_masked_entries(dtype: torch.dtype, num_top: int):
    vocab = TILE + 100
    logits = random_logits(6, vocab, vocab + 28, dtype, seed=5)
    logits[0, 10:] = -math.inf  # fewer entries than the top 20 has, and none in the last tile
    logits[1, :-10] = -math.inf
    logits[2, ::2] = -math.inf
    logits[3, : TILE - 1] = -math.inf
    logits[4] = -math.inf
    logits[5, : TILE // 2] = torch.finfo(dtype).min
    targets = torch.tensor([vocab - 1, 0, 4, vocab - 1, 7, 5])
    check(logits, targets, scored(logits, targets, num_top))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("dtype", "num_top"), [(torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 5)])
def test_nan_and_infinity_are_never_numbers(dtype: torch.dtype, num_top: int, bad: float):
    vocab = TILE + 9
    logits = random_logits(8, vocab, vocab, dtype, seed=6)
    for row, column in enumerate((0, 1, 777, TILE - 1, TILE, vocab - 1)):
        logits[row, column] = bad
    logits[6] = bad
    tokens, logprobs, _ = scored(logits, torch.full((8,), 777), num_top)
    assert logprobs[:7].isnan().all()
    assert logprobs[7].isfinite().all()
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_rows_beyond_two_to_the_thirty_one_entries():
    """Offsets of entries do not fit in 32 bits; the memory between the rows is never touched."""
    stride = 2**30 + 64
    logits = torch.empty(2 * stride + 100, dtype=torch.bfloat16).as_strided((3, 100), (stride, 1))
    logits.copy_(random_logits(3, 100, 100, torch.bfloat16, seed=8))
    targets = torch.tensor([3, 50, 99])
    for num_top in (1, 4):
        check(logits, targets, scored(logits, targets, num_top))


@pytest.mark.parametrize(("num_top", "temperature"), [(1, 1.0), (20, 1.0), (2, 0.6)])
@pytest.mark.parametrize(
    "ends",
    [
        [500, 1000],
        [334, 668, 1000],
        [250, 500, 750, 1000],
        [125, 250, 375, 500, 625, 750, 875, 1000],
        [4, 4, 995, 1000],
    ],
    ids=len,
)
def test_parts_of_a_vocabulary_give_what_the_whole_gives(ends: list[int], num_top: int, temperature: float):
    logits = random_logits(9, 1000, 1000, torch.bfloat16, seed=len(ends))
    logits[1, ends[0] :] = -math.inf
    logits[2, : ends[-2]] = -math.inf
    logits[3, 6:] = -math.inf  # fewer entries than the top 20 has
    logits[4] = logits[4, 0]
    logits[5] = -math.inf
    targets = torch.tensor([0, 999, 0, 999, 500, 3, ends[0], ends[0] - 1, ends[-2]])
    # Each held by one rank, and with a temperature alone.
    candidates = (targets[:, None] + torch.tensor([0, 400])).int() % 1000 if temperature != 1.0 else None
    ranks, calls = in_parts(
        ends, [logits], lambda shard, part: scored(part, targets, num_top, 4, shard, candidates, temperature)
    )
    for scores in ranks:
        check(logits, targets, scores, candidates, temperature)
    # For each of three chunks its targets, and at the end the rows and the candidates.
    assert calls == [4 + (candidates is not None)] * len(ends)
