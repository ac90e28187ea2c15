"""Resamples against arch and scipy, and a simulation of what their intervals cover."""

import math

import numpy as np
import pytest
from arch.bootstrap import StationaryBootstrap, optimal_block_length
from interval_coverage import DEPENDENCES, measure
from scipy import stats

from scoremode.comparison.bootstrap import MANY_UNITS, MIN_UNITS, block_length, cut_units, exact_interval, resample

RNG_SEED = 20261122


def sizes(*numbers) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_units_are_windows_which_are_cut_if_few_and_joined_if_many():
    units = cut_units(sizes(*[100] * 39, 7))
    assert (units.sizes.tolist(), units.name) == ([100] * 39 + [7], "windows")
    values = np.random.default_rng(0).normal(size=(3907, 2))
    expected = [part.sum(axis=0) for part in np.split(values, range(100, 3907, 100))]
    np.testing.assert_allclose(units.sums(values), expected, rtol=1e-12)
    few = cut_units(sizes(1000, 0, 250, 10))
    assert few.name == "segments of windows"
    ends = np.cumsum(few.sizes)
    assert {1000, 1250, 1260} <= set(ends), "no segment crosses windows"
    assert few.starts.tolist() == [0, *ends[:-1]]
    assert (min(few.sizes[:-1]), few.sizes[-1]) >= (16, 10), "the last window is too short to be cut"
    assert len(few.sizes) >= MIN_UNITS
    many = cut_units(sizes(*[1] * (2 * MANY_UNITS + 1)))
    assert many.name == "groups of 3 windows"
    assert (many.sizes.sum(), len(many.sizes) <= MANY_UNITS) == (2 * MANY_UNITS + 1, True)


def test_resamples_are_archs():
    series = np.random.default_rng(RNG_SEED).normal(size=(60 * 50, 2))
    [found] = resample(series, series, sizes(*[50] * 60), num_resamples=30, seed=5)
    windows = series.reshape(60, 50, 2)
    length = block_length(cut_units(sizes(*[50] * 60)), series)
    bootstrap = StationaryBootstrap(length, windows, seed=np.random.default_rng(5))
    expected = [drawn.mean(axis=(0, 1)) for (drawn,), _ in bootstrap.bootstrap(30)]
    # Sums in another order.
    np.testing.assert_allclose(found.means, expected, rtol=0, atol=1e-12)
    assert found.blocks == f"stationary blocks of {length} on average, of 60 windows"


def test_blocks_are_twice_as_long_as_is_best_within_bounds():
    rng = np.random.default_rng(RNG_SEED)
    levels = [rng.normal()]
    while len(levels) < 400:
        levels.append(0.8 * levels[-1] + 0.6 * rng.normal())
    wanted = optimal_block_length(4 * (levels - np.mean(levels)))["stationary"].item()
    assert wanted > 400 ** (1 / 3)
    assert block_length(cut_units(sizes(*[4] * 400)), np.repeat(levels, 4)[:, None]) == math.ceil(2 * wanted)
    assert block_length(cut_units(sizes(*[4] * 1000)), np.ones((4000, 1))) == 10, "the cube root"
    assert block_length(cut_units(sizes(*[4] * 50)), np.arange(200.0)[:, None]) <= 12, "a quarter"


def test_whole_documents_are_drawn_and_groups_are_ratios_over_them():
    rng = np.random.default_rng(RNG_SEED)
    # Document 3 has one window without targets, and document 7 none with targets.
    documents = np.repeat(np.arange(40), rng.integers(1, 5, 40)).astype(np.int32)
    window_sizes = rng.integers(1, 90, len(documents)).astype(np.int32)
    window_sizes[[np.flatnonzero(documents == 3)[0], *np.flatnonzero(documents == 7)]] = 0
    of_token = np.repeat(documents, window_sizes)
    values = rng.exponential(size=(len(of_token), 1))
    often, rarely = rng.random(len(of_token)) < 0.2, np.isin(of_token, range(12))
    values[rarely.argmin()] = np.inf
    groups = [often & ~np.isinf(values[:, 0]), rarely]
    found = resample(values, values, window_sizes, documents, groups, num_resamples=400, seed=3)
    assert found[0].blocks == "39 documents drawn one by one"
    tokens = [np.flatnonzero(of_token == document) for document in range(40) if document != 7]
    drawings = StationaryBootstrap(1, np.arange(39), seed=np.random.default_rng(3)).bootstrap(400)
    drawn = [np.concatenate([tokens[place] for place in places]) for (places,), _ in drawings]
    np.testing.assert_allclose(found[1].means[:, 0], [values[at[groups[0][at]], 0].mean() for at in drawn], rtol=1e-12)
    # Linearization gives the cluster-robust error of a ratio.
    inside = groups[0]
    mean, total = values[inside, 0].mean(), inside.sum()
    errors = [(values[at[inside[at]], 0] - mean).sum() / total for at in tokens]
    assert found[1].means.std() == pytest.approx(np.linalg.norm(errors), rel=0.1)
    counts = np.array([inside[at].sum() for at in tokens])
    number = counts.sum() ** 2 / (counts**2).sum()
    assert found[1].factor == pytest.approx(stats.t.ppf(0.975, number - 1) * math.sqrt(number / (number - 1)))
    # Infinite in the text, but not in the group; and a group of eleven documents has no interval.
    assert found[0].interval(1.0, found[0].means[:, 0]) == (None, None)
    assert None not in found[1].interval(1.0, found[1].means[:, 0])
    assert found[2].interval(1.0, found[2].means[:, 0]) == (None, None)
    [few] = resample(values, values, window_sizes, documents // 4, num_resamples=10, seed=0)
    assert few.blocks == "no intervals: windows of one document are not independent, and 10 documents are too few"
    assert few.interval(1.0, few.means[:, 0]) == (None, None)


def test_on_dependent_data_blocks_cover_what_independence_does_not():
    """`bench/interval_coverage.py`, with fewer trials."""
    [strong] = [dependence for dependence in DEPENDENCES if dependence.name == "strong"]
    found = measure(strong, 50, 200, num_resamples=200, seed=1)
    # 93 to 97 % of 200 trials, less or more three binomial deviations of 1.5 %.
    independent_level, blocks_level, independent_difference, blocks_difference = found
    assert min(blocks_level, blocks_difference) >= 0.885
    assert max(independent_level, independent_difference) < 0.5


@pytest.mark.parametrize(
    ("hits", "number"), [(60, 60), (0, 40), (59, 60), (1, 1), (0, 1), (7, 40), (999_999, 1_000_000)]
)
def test_an_exact_interval_is_scipys(hits, number):
    expected = stats.binomtest(hits, number).proportion_ci(method="exact")
    # Scipy has another inverse of the incomplete beta function; both are right to float64's last digits.
    assert exact_interval(hits / number, number) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-15)


def test_a_share_has_an_interval_with_a_width_where_no_token_differs():
    """At the edge as if tokens were independent; elsewhere wide enough for tokens of a document that are alike."""
    documents = np.arange(40, dtype=np.int32)
    same = np.ones((4000, 1))
    [found] = resample(same, same, sizes(*[100] * 40), documents, num_resamples=200, seed=0)
    low, high = found.share_interval(1.0, found.means[:, 0], 4000)
    assert (low, high) == pytest.approx((0.025 ** (1 / 4000), 1))
    # One document of forty differs in all tokens: about as much is known as of forty answers.
    same[:100] = 0
    [found] = resample(same, same, sizes(*[100] * 40), documents, num_resamples=2000, seed=0)
    low, high = found.share_interval(0.975, found.means[:, 0], 4000)
    # The spread of 2,000 resamples is known to 1/sqrt(4000).
    assert low == pytest.approx(stats.binomtest(39, 40).proportion_ci().low, abs=0.02)
    assert 0.995 < high <= 1


def test_equal_resamples_give_no_interval_though_tokens_differ():
    """Thirty windows of one passage: sums in another order differ by roundings."""
    values = np.tile(np.random.default_rng(RNG_SEED).exponential(3, 100), 45)[:, None]
    [found] = resample(values, values, sizes(*[100] * 45), num_resamples=50, seed=0)
    assert found.interval(values.mean(), found.means[:, 0]) == (None, None)
