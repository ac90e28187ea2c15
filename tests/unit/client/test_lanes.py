"""The verdict on two lanes."""

import numpy as np
import pytest

from scoremode.runs import lane_difference

POSITIONS = np.tile(np.arange(1, 2048), 8)
RANDOM = np.random.default_rng(31)
PREFILL = RANDOM.exponential(2.5, len(POSITIONS))
ROUNDING = RANDOM.normal(0, 0.01, len(POSITIONS))


@pytest.mark.parametrize(
    ("fault", "differs_from", "words"),
    [
        (0 * POSITIONS, {None}, "agrees with prefill"),
        (np.full(len(POSITIONS), 0.02), {1}, "differs from prefill: +0.0"),
        (np.where(POSITIONS >= 512, 0.02, 0), {512}, "from position 512 on"),
        (POSITIONS * 2e-5, {64, 128}, "comes from the KV cache"),
    ],
)
def test_a_difference_beyond_rounding_is_found_from_its_first_position_on(fault, differs_from, words):
    found = lane_difference(PREFILL, PREFILL + ROUNDING + fault, POSITIONS)
    assert found.differs_from in differs_from
    assert words in found.verdict()
    assert found.mean == pytest.approx(float((ROUNDING + fault).mean()), abs=1e-12)
    assert [first for first, _, _ in found.by_position] == [2**octave for octave in range(11)]
    assert found.by_position[-1][1] == 2048


def test_lanes_without_a_finite_value_in_common_have_no_verdict():
    found = lane_difference(np.array([np.inf, 1.0]), np.array([1.0, np.inf]), np.array([1, 2]))
    assert "cannot be compared" in found.verdict()
