"""Divergences next to float64 formulas."""

import math
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode_server.kernels import fused_logprobs
from scoremode_server.kernels.fused_logprobs import Chunk
from scoremode_server.kernels.reduced_rows import Shard
from scoremode_server.references.worker import kl_divergence
from tests.unit.server.kernels.row_checks import DTYPES, Scores, check, in_parts, random_logits

pytestmark = pytest.mark.usefixtures("kernels")

RELATIVE = 4e-6
"""Triton's lanes add up some hundred positive terms each in float32. A term has a few roundings, and where p is small,
its logarithm's: 1e-6 at exp(-20)."""
ABSOLUTE = 1e-12
"""The square of a rounding of a normalizer in float32, some 1e-7: its first order cancels."""
ACCEPTANCE = 2e-7
"""Two roundings of float32 at 1."""


@dataclass
class Comparison:
    """Two distributions in each row, and the figures of `kl_divergence.compare`."""

    kld: torch.Tensor
    reverse_kld: torch.Tensor
    acceptance: torch.Tensor
    served: Scores
    reference: Scores


def compare(
    targets: torch.Tensor, served: torch.Tensor, reference: torch.Tensor, num_top: int, limit: int, shard: Shard | None
) -> Comparison:
    """Compare logits chunk by chunk, as workers do, on their device only."""

    def sink(chunk: Chunk) -> dict[str, torch.Tensor]:
        return kl_divergence.compare(chunk, reference[chunk.place])

    with torch.device("cpu"):
        found = fused_logprobs.compute(targets, served, lambda rows: rows, max(1, num_top), limit, shard, sinks=[sink])
    sides = [
        (found[f"{side}token_ids"], found[f"{side}logprobs"], found[f"{side}ranks"]) for side in ("", "reference_")
    ]
    return Comparison(found["kld"], found["reverse_kld"], found["acceptance"], *sides)


def compared(served: torch.Tensor, reference: torch.Tensor, num_top: int = 1) -> Comparison:
    """`compare` with the first tokens for targets."""
    return compare(torch.arange(len(served)) % served.shape[1], served, reference, num_top, 1000, None)


def figures(comparison: Comparison) -> torch.Tensor:
    return torch.stack((comparison.kld, comparison.reverse_kld, comparison.acceptance))


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[rows] float64, KL(p||q) by its definition; p may be too small for a number where q = 0."""
    terms = torch.where(log_q == -math.inf, math.inf, log_p.exp() * (log_p - log_q))
    return torch.where(log_p == -math.inf, 0.0, terms).sum(1)


def check_divergences(
    served: torch.Tensor,
    reference: torch.Tensor,
    comparison: Comparison,
    relative: float = RELATIVE,
    absolute: float = ABSOLUTE,
) -> None:
    log_q, log_p = served.double().log_softmax(1), reference.double().log_softmax(1)
    both = ((comparison.kld, divergence(log_p, log_q)), (comparison.reverse_kld, divergence(log_q, log_p)))
    for found, exact in both:
        assert found.dtype == torch.float32
        assert not (found < 0).any()
        torch.testing.assert_close(found.double(), exact, rtol=relative, atol=absolute, equal_nan=True)
    exact = torch.minimum(log_p.exp(), log_q.exp()).sum(1)
    assert comparison.acceptance.dtype == torch.float32
    assert not ((comparison.acceptance < 0) | (comparison.acceptance > 1)).any()
    torch.testing.assert_close(comparison.acceptance.double(), exact, rtol=0, atol=ACCEPTANCE, equal_nan=True)


def check_all(served: torch.Tensor, reference: torch.Tensor, comparison: Comparison, targets: torch.Tensor) -> None:
    check_divergences(served, reference, comparison)
    for logits, scored in ((served, comparison.served), (reference, comparison.reference)):
        check(logits, targets, scored)


def test_two_tokens_by_hand():
    """p = (1/2, 1/2), q = (3/4, 1/4)."""
    comparison = compared(torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[5.0, 5.0]]).log())
    assert comparison.kld.item() == pytest.approx(math.log(4 / 3) / 2, rel=RELATIVE)
    assert comparison.reverse_kld.item() == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), rel=RELATIVE)
    assert comparison.acceptance.item() == pytest.approx(0.75, abs=ACCEPTANCE)
    assert comparison.served[0].tolist() == [[0, 0]]
    assert comparison.served[1].tolist() == [pytest.approx([math.log(0.75)] * 2)]
    assert comparison.reference[2].tolist() == [2]


@pytest.mark.parametrize(("dtype", "reference_dtype"), [(dtype, dtype) for dtype in DTYPES] + [(DTYPES[0], DTYPES[2])])
@pytest.mark.parametrize("vocab", [1, 129, 4096, 8193])
@pytest.mark.parametrize("num_top", [0, 5])
def test_random_rows(dtype: torch.dtype, reference_dtype: torch.dtype, vocab: int, num_top: int):
    served = random_logits(4, vocab, vocab + 63, dtype, seed=1)
    reference = random_logits(4, vocab, vocab + 5, reference_dtype, seed=2)
    targets = torch.tensor([0, vocab - 1, vocab // 2, vocab // 3])
    comparison = compare(targets, served, reference, min(num_top, vocab), 3, None)
    assert comparison.served[0].shape == (4, 1 + max(1, min(num_top, vocab)))
    check_all(served, reference, comparison, targets)


@pytest.mark.parametrize(
    ("vocab", "scale", "noise"),
    [
        *((vocab, scale, 0.3) for vocab in (49_152, 262_144) for scale in (0.01, 1.0, 6.0, 40.0)),
        # float32 arithmetic adds far less than a small difference, which gives some square of itself.
        *((49_152, scale, noise) for scale in (0.4, 20.0) for noise in (1e-6, 1e-4, 1e-2)),
    ],
)
def test_flat_and_peaked_rows_of_large_vocabularies(vocab: int, scale: float, noise: float):
    reference = random_logits(2, vocab, vocab, torch.float32, seed=3) * (scale / 4)
    served = reference + random_logits(2, vocab, vocab, torch.float32, seed=4) * (noise / 4)
    check_divergences(served, reference, compared(served, reference))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "scale"), [(3, 5.0), (8193, 0.0), (8193, 5.0), (262_144, 0.5)])
def test_equal_logits_do_not_diverge_at_all(dtype: torch.dtype, vocab: int, scale: float):
    logits = random_logits(2, vocab, vocab, dtype, seed=5) * scale
    logits[1, ::2] = -math.inf
    assert figures(compared(logits, logits.clone())).tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_tokens_that_one_side_excludes_make_infinite_divergences():
    excluded = [-math.inf, 0.0, 0.0]
    everything = [0.0, 0.0, 0.0]
    other = [0.0, -math.inf, 0.0]
    served = torch.tensor([excluded, everything, excluded, excluded])
    reference = torch.tensor([everything, excluded, excluded, other])
    comparison = compared(served, reference, 3)
    assert comparison.kld.tolist() == [math.inf, pytest.approx(math.log(1.5)), 0.0, math.inf]
    assert comparison.reverse_kld.tolist() == [pytest.approx(math.log(1.5)), math.inf, 0.0, math.inf]
    assert comparison.acceptance.tolist() == pytest.approx([2 / 3, 2 / 3, 1.0, 0.5], abs=ACCEPTANCE)
    assert comparison.served[1][0].tolist() == pytest.approx([-math.inf] + [-math.log(2)] * 2 + [-math.inf])


def test_an_excluded_token_counts_however_unlikely_the_other_side_finds_it():
    """Its probability is too small for float32, as are those of the tokens that no side excludes."""
    reference = torch.tensor([[0.0, -200.0], [0.0, -200.0], [0.0, -200.0]])
    served = torch.tensor([[0.0, -math.inf], [0.0, -300.0], [0.0, torch.finfo(torch.float32).min]])
    comparison = compared(served, reference)
    assert comparison.kld.tolist() == [math.inf, 0.0, 0.0]
    assert comparison.reverse_kld.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("side", ["served", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_on_either_side_is_never_a_number(side: str, dtype: torch.dtype, bad: float):
    vocab = 8200
    logits = {name: random_logits(6, vocab, vocab, dtype, seed=9) for name in ("served", "reference")}
    for row, column in enumerate((0, 1, 4100, 8191, vocab - 1)):
        logits[side][row, column] = bad
    comparison = compared(logits["served"], logits["reference"], 2)
    assert figures(comparison).isnan().tolist() == [[True] * 5 + [False]] * 3
    assert getattr(comparison, side)[1][:5].isnan().all()
    assert not (comparison.reference if side == "served" else comparison.served)[1].isnan().any()


def test_a_row_of_minus_infinity_alone_is_not_a_distribution():
    nothing = torch.full((1, 300), -math.inf)
    for served, reference in ((nothing, torch.zeros(1, 300)), (torch.zeros(1, 300), nothing), (nothing, nothing)):
        assert figures(compared(served, reference)).isnan().all()


# The lowest float32 is left out, since a sum of terms may round to infinity: on a GPU it did.
LOGIT = st.one_of(st.floats(-40, 40, width=32), st.sampled_from([0.0, -math.inf, -1e4, 1e4, -1e38]))


# Triton's interpreter is slow, and its compiler in the first example.
@settings(max_examples=30 if os.environ.get("TRITON_INTERPRET") == "1" else 200, deadline=None)
@given(st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=40))
def test_any_two_rows(pairs: list[tuple[float, float]]):
    served, reference = (torch.tensor([side]) for side in zip(*pairs, strict=True))
    # The roundings of terms where p and q are not close, and of differences of logits: the exponent of exp(-80) is
    # rounded twice, each time by up to 2^-24 of it, and such a term may be the largest where the other side has -3e38.
    check_divergences(served, reference, compared(served, reference), relative=1e-5, absolute=1e-6)


@pytest.mark.parametrize("ends", [[500, 1000], [334, 334, 1000], [125, 250, 375, 500, 625, 750, 1000, 1000]], ids=len)
@pytest.mark.parametrize("num_top", [1, 20])
def test_parts_of_a_vocabulary_give_what_the_whole_gives(ends: list[int], num_top: int):
    """Some with no token at all, some with nothing but -inf."""
    served = random_logits(9, 1000, 1000, torch.bfloat16, seed=14)
    reference = random_logits(9, 1000, 1000, torch.bfloat16, seed=15)
    served[1, ends[0] :] = -math.inf
    reference[1:3, ends[0] :] = -math.inf
    reference[3, 6:] = -math.inf
    served[4] = served[4, 0]
    targets = torch.tensor([0, 999, 0, 999, 500, 3, ends[0], ends[0] - 1, 998])
    ranks, calls = in_parts(
        ends, [served, reference], lambda shard, *sides: compare(targets, *sides, num_top, 4, shard)
    )
    for comparison in ranks:
        check_all(served, reference, comparison, targets)
    # For each of three chunks targets and reduced rows of both sides and the sums, and at the end all rows.
    assert calls == [16] * len(ends)


def test_nan_in_any_part_is_never_a_number():
    sides = [random_logits(4, 300, 300, torch.float32, seed=seed) for seed in (17, 18)]
    sides[0][0, 0] = sides[1][1, 150] = sides[0][2, 299] = math.nan
    targets = torch.arange(4)
    for comparison in in_parts([100, 200, 300], sides, lambda shard, *parts: compare(targets, *parts, 1, 9, shard))[0]:
        assert figures(comparison).isnan().tolist() == [[True, True, True, False]] * 3
        assert comparison.served[1].isnan().all(1).tolist() == [True, False, True, False]
