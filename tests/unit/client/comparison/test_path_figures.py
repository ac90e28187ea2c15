"""Divergences tested against repeats of the default path, next to SciPy's tests and in simulations, and the figures of
paths."""

from dataclasses import replace

import numpy as np
import pytest
from fake_server import INFO
from run_files import kld_run, made_up_nlls
from scipy import stats

from scoremode import ServerInfo
from scoremode.comparison.excess import Excess, excess, significant
from scoremode.comparison.paths import kld_test, lane_figures, part_tests, same_path

NUM_PATHS, NUM_UNITS, NUM_REPEATS = 20, 40, 4


def test_repeats_add_their_variance_as_a_second_sample_of_welchs_test():
    random = np.random.default_rng(2)
    means, sums = random.normal(1, 0.02, NUM_REPEATS), random.normal(11.5, 0.5, (NUM_REPEATS, NUM_UNITS))
    found = excess(sums, 10 * np.tile(means[:, None], NUM_UNITS), np.full(NUM_UNITS, 10))
    differences = sums.mean(axis=1) / 10 - means
    by_unit, by_repeat = np.std(sums.mean(axis=0) / 10, ddof=1), np.std(differences, ddof=1)
    samples = differences.mean(), by_unit, NUM_UNITS, 0.1 * means.mean(), by_repeat, NUM_REPEATS
    expected = stats.ttest_ind_from_stats(*samples, equal_var=False, alternative="greater")
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((0.1, 0.2), abs=0.05)


@pytest.mark.parametrize(
    ("sums", "floors", "expected"),
    [
        ([1.0] * 20, [1.0] * 20, (0, 0, 0, 1)),
        ([1.2] * 20, [1.0] * 20, (0.1, 0.1, 0.1, 0)),
        ([np.inf] * 20, [1.0] * 20, (np.inf, None, None, 0)),
        ([np.inf] * 20, [np.inf] * 20, (np.nan, None, None, None)),
        ([1.2] * 19, [1.0] * 19, (0.1, None, None, None)),
    ],
    ids=["equal", "without noise", "infinite", "infinite, as the floor", "too few units"],
)
def test_units_of_two_tokens_without_noise(sums, floors, expected):
    found = excess(np.array([sums] * 2), np.array([floors] * 2), np.full(len(sums), 2))
    assert (found.value, found.low, found.high, found.p) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_holms_method_rejects_more_than_bonferronis():
    """The limits of three tests are 0.05 / 3, 0.05 / 2 and 0.05, and a test without p counts as one of them."""
    assert significant([Excess(1, 1, 0, 0, p) for p in (0.02, None, 0.01)]) == [True, False, True]


@pytest.mark.parametrize(
    ("more", "run_noise", "least", "most"),
    [(0, 0.01, 0, 0.05), (0, 0.1, 0, 0.05), (0.5, 0.01, 0.95, 1), (1, 0.05, 0.95, 1)],
    ids=["equal", "equal, noisy runs", "half of the floor", "doubled, noisy runs"],
)
def test_equal_paths_give_few_alarms_and_one_that_differs_is_found(more, run_noise, least, most):
    """200 tables of 20 paths. Segments of the text differ by 50 %, each varies by 10 % between runs, and all of a run
    together by `run_noise`. Batches of a repeat change all paths by up to 70 %, as those of a W4A16 model on an H200.
    The first path has more than the floor."""
    random, sizes, alarms = np.random.default_rng(3), np.full(NUM_UNITS, 1024), 0
    batches = np.array([1, 1, 1.2, 1.7])[:, None]
    for _ in range(200):
        shape = NUM_PATHS + 1, NUM_REPEATS, NUM_UNITS
        runs = random.gamma(100, 1 / 100, shape) * random.lognormal(0, 0.5, NUM_UNITS) * batches
        floor, *paths = runs * random.normal(1, run_noise, (*shape[:2], 1))
        paths[0] = paths[0] + more * floor.mean(axis=0)
        # Holm's method rejects none if the smallest p exceeds its first limit.
        alarms += min(excess(path, floor, sizes).p for path in paths) <= 0.05 / NUM_PATHS
    assert least <= alarms / 200 <= most


def test_runs_are_paired_by_number_and_one_of_several_has_no_verdict(tmp_path):
    """The second of two has other batches, which double the floor."""
    floor, path = (
        [kld_run(tmp_path, f"{more}-{kld}", made_up_nlls(0), np.full(3000, kld + more)) for kld in (0.01, 0.02)]
        for more in (0, 0.002)
    )
    paired, crossed = (kld_test(runs, floor) for runs in (path, path[::-1]))
    assert (paired.value, crossed.value) == pytest.approx((0.002, 0.002))
    assert paired.p < 0.05 < crossed.p
    one = kld_test(path[:1], floor)
    assert (one.value, one.p) == (pytest.approx(0.002), None)


def test_a_path_differs_from_a_position_on(tmp_path):
    """Windows of 100 targets after one token; the last 37 are on positions from 64 on."""
    late = np.tile(np.arange(1, 101) >= 64, 30)
    values = {"one": 0.001 + 0 * late, "two": 0.003 + 0 * late, "equal": 0.002 + 0 * late, "other": 0.002 + 0.1 * late}
    runs = (kld_run(tmp_path, name, made_up_nlls(0), kld) for name, kld in values.items())
    one, two, equal, other = (replace(run, window_contexts=np.ones(30, np.int32)) for run in runs)
    same, differing = lane_figures([[equal] * 2, [other] * 2], {"prefill": [one, two]})
    assert (same.differs, same.differs_from) == (False, None)
    assert (differing.differs, differing.differs_from, differing.tokens_per_second) == (True, 64, 3000)
    *_, last = differing.by_position
    assert (last.name, last.num_tokens) == ("64 to 127", 37 * 30)
    assert [differing.excess.mean, differing.excess.floor, last.kld] == pytest.approx([0.002 + 0.037, 0.002, 0.102])
    assert [(group.by, group.name) for group in differing.groups] == [("confidence", "0.5 ≤ p < 0.9")]
    assert kld_test([equal], [other]).high < 0 < kld_test([other], [equal]).low


def test_a_block_is_named_if_its_cost_exceeds_what_resuming_costs_the_default_path():
    """Measured on a CPU in bfloat16: the default path is resumed at 0 to 5.7e-5 nats, and a fault of layer 1 makes
    layer 0 cost 2.4e-5 more, without a fault of its own."""
    default, faulty = (
        np.array(figures) * 1e-5 for figures in ([0, 0, 5.7, 2.4, 1.8, 1.1], [9.2, 9.2, 12.4, 9.2, 1.8, 1.1])
    )
    noise = np.random.default_rng(0).normal(1, 0.02, (8, 1))
    tests = part_tests(np.array([64 * faulty * noise] * 4), np.array([64 * default * noise] * 4), np.full(8, 64))
    assert [test.value * 1e5 for test in tests] == pytest.approx([0, 2.5, 0.1, 6.8, 0, 0], abs=0.3)
    assert significant(tests) == [False, False, False, True, False, False]
    exact = part_tests(np.array([64 * faulty * noise] * 4), np.zeros((4, 8, 6)), np.full(8, 64))
    assert significant(exact) == [False, False, True, True, True, True], "all that cost more, where resuming is exact"


def test_paths_are_the_same_if_servers_report_the_same_kernels():
    marlin, machete, unknown = (
        ServerInfo(**{**INFO, "computed_by": kernels and {"kernels": [kernels]}}) for kernels in ("M", "N", None)
    )
    half = machete.model_copy(update={"dtype": "float16"})
    servers = dict(enumerate([marlin, machete, unknown, half, marlin, unknown]))
    assert [same_path(name, servers) for name in servers] == [None, None, None, None, 0, None]
