"""Benchmarks: ratios of pairs against intervals worked out by hand."""

import pytest
from paired import paired_ratio


def test_the_interval_is_students_of_the_log_ratios():
    # Log ratios 0, ln 2 and ln 4: mean ln 2, standard deviation ln 2, and 4.302653 for two degrees of freedom.
    ratio = paired_ratio([10, 20, 80], [10, 10, 20])
    assert ratio.mean == pytest.approx(2)
    assert ratio.interval == pytest.approx((0.35746, 11.19000), abs=1e-4)
    assert str(ratio) == "2.000 [0.357, 11.190]"
    assert (paired_ratio([3], [2]).interval, paired_ratio([1, 0], [1, 1])) == (None, None)
