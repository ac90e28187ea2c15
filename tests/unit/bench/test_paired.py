"""Benchmarks: ratios of pairs against intervals worked out by hand, and the one schema of their results."""

import json
import math
from pathlib import Path

import pytest
from paired import paired_ratio


def test_the_interval_is_students_of_the_log_ratios():
    # Log ratios 0, ln 2 and ln 4: mean ln 2, standard deviation ln 2, and 4.302653 for two degrees of freedom.
    ratio = paired_ratio([10, 20, 80], [10, 10, 20])
    assert ratio is not None
    assert ratio.mean == pytest.approx(2)
    half = 4.302653 / math.sqrt(3)
    assert ratio.interval == pytest.approx((2 * 2**-half, 2 * 2**half))
    assert ratio.interval == pytest.approx((0.35746, 11.19000), abs=1e-4)
    assert str(ratio) == "2.000 [0.357, 11.190]"


def test_one_pair_has_a_ratio_and_no_interval():
    ratio = paired_ratio([3], [2])
    assert ratio is not None
    assert (ratio.mean, ratio.interval, str(ratio)) == (pytest.approx(1.5), None, "1.500")


def test_what_was_too_short_to_measure_has_no_ratio():
    assert paired_ratio([1, 0], [1, 1]) is None


ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "bench" / "results").glob("*.json"))
FIELDS = {"what", "hardware", "versions", "command", "commit", "date", "rows"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_have_one_schema_and_a_link(file):
    results = json.loads(file.read_text())
    assert set(results) == {"subject", "measurements"}
    for measurement in results["measurements"]:
        assert set(measurement) - {"notes"} == FIELDS
        assert all(measurement[field] for field in FIELDS)
        if measurement["commit"] == "as in each row":
            assert all("commit" in row for row in measurement["rows"])
    assert any(f"](../bench/results/{file.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
