"""Statistics of KL divergence: against numpy on random vectors. `cli/test_kld_tables.py` has a case worked by hand."""

import math

import numpy as np
import pytest

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics

SIZES = [700, 1, 0, 299, 999]
QUANTILES = {"p999": 99.9, "p99": 99, "p95": 95, "p90": 90, "median": 50, "p10": 10, "p5": 5, "p1": 1, "p01": 0.1}


def positions(n: int, **fields) -> KldPositions:
    """Made-up positions; `fields` replace arrays."""
    random = np.random.default_rng(0)
    base = random.exponential(3, n)
    arrays = {
        "token_ids": random.integers(0, 1000, n),
        "kld": random.exponential(0.05, n) ** 2,
        "reverse_kld": random.exponential(0.06, n) ** 2,
        "acceptance": random.uniform(0.8, 1, n),
        "logprobs": -np.abs(base + random.normal(0, 0.1, n)),
        "reference_logprobs": -base,
        "ranks": random.integers(1, 9, n),
        "reference_ranks": random.integers(1, 9, n),
        "top_token_ids": random.integers(0, 3, n),
        "reference_top_token_ids": random.integers(0, 2, n),
        "reference_confidence": random.uniform(0, 1, n),
        **fields,
    }
    return KldPositions(**{name: np.asarray(array, POSITION_DTYPES[name]) for name, array in arrays.items()})


def float64(array):
    return array.astype(np.float64)


@pytest.fixture(scope="module")
def made_up():
    return positions(sum(SIZES))


@pytest.fixture(scope="module")
def figures(made_up):
    return statistics(made_up, SIZES)


def stderr(values):
    """numpy's sample deviation over the root of n: llama.cpp's sqrt((mean(x²) - mean(x)²) / (n - 1))."""
    return values.std(ddof=1) / math.sqrt(len(values))


def test_divergences_are_those_of_numpy(made_up, figures):
    kld = float64(made_up.kld)
    expected = {
        "mean": kld.mean(),
        "stderr": stderr(kld),
        "min": kld.min(),
        "max": kld.max(),
        **{name: np.percentile(kld, percent) for name, percent in QUANTILES.items()},
        "reverse_kld_mean": float64(made_up.reverse_kld).mean(),
        "acceptance_mean": float64(made_up.acceptance).mean(),
        "top_1_percent_share": np.sort(kld)[-20:].sum() / kld.sum(),
        "num_scored": 1999,
        "num_windows": 5,
        "num_infinite_kld": 0,
    }
    found = {**figures, **figures["kld"]}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_perplexities_and_paired_figures_are_those_of_numpy(made_up, figures):
    q, base = -float64(made_up.logprobs), -float64(made_up.reference_logprobs)
    n = len(q)
    covariance = np.cov(q, base)
    ppl_q, ppl_base = np.exp(q.mean()), np.exp(base.mean())
    expected = {
        "nll_q": q.mean(),
        "nll_base_stderr": stderr(base),
        "ppl_q": ppl_q,
        "ppl_q_stderr": ppl_q * stderr(q),
        "ppl_base": ppl_base,
        "ppl_base_stderr": ppl_base * stderr(base),
        "ln_ppl_correlation": np.corrcoef(q, base)[0, 1],
        "ln_ppl_ratio": q.mean() - base.mean(),
        "ln_ppl_ratio_stderr": math.sqrt((covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / n),
        "ppl_ratio": ppl_q / ppl_base,
        "ppl_ratio_stderr": ppl_q / ppl_base * stderr(q - base),
        "ppl_difference": ppl_q - ppl_base,
        "ppl_difference_stderr": math.sqrt(
            (ppl_q**2 * covariance[0, 0] + ppl_base**2 * covariance[1, 1] - 2 * ppl_q * ppl_base * covariance[0, 1]) / n
        ),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_errors_are_clustered_by_window(made_up):
    # Windows (0, 1) and (2, 5) of mean 2: their sums of deviations are -3 and 3. sqrt(2 / 1 · (9 + 9)) / 4 = 1.5.
    assert statistics(positions(4, kld=[0, 1, 2, 5]), [2, 0, 2])["kld"]["stderr_clustered"] == pytest.approx(1.5)
    # Windows of one position have the usual error.
    figures = statistics(made_up, [1] * len(made_up))
    for group, name in (
        (figures["kld"], "stderr"),
        (figures["delta_p"], "stderr"),
        (figures, "ln_ppl_ratio_stderr"),
        (figures, "same_top_p_stderr"),
    ):
        assert group[f"{name}_clustered"] == pytest.approx(group[name], rel=1e-12)


def test_errors_are_exact_next_to_large_means():
    # mean(x²) - mean(x)² of float64 would be 0 or worse here.
    far = positions(1000, logprobs=np.full(1000, -9000.0), reference_logprobs=np.full(1000, -9000.0) + 2**-10)
    assert statistics(far, [1000])["ln_ppl_ratio_stderr"] == 0
    assert statistics(far, [1000])["ln_ppl_ratio"] == 2**-10


def test_a_model_does_not_diverge_from_itself():
    same = np.log([0.5, 0.25])
    tops = {"top_token_ids": [1, 2], "reference_top_token_ids": [1, 2]}
    figures = statistics(positions(2, logprobs=same, reference_logprobs=same, kld=[0, 0], **tops), [1, 1])
    assert (figures["kld"]["mean"], figures["kld"]["stderr"], figures["ln_ppl_ratio_stderr"]) == (0, 0, 0)
    assert (figures["same_top_p"], figures["same_top_p_stderr"], figures["delta_p"]["rms"]) == (1, 0, 0)
    assert (figures["top_1_percent_share"], figures["delta_p"]["rms_stderr"]) == (None, None), "0 / 0"
    figures = statistics(positions(1), [1])
    undefined = (figures["kld"]["stderr"], figures["kld"]["stderr_clustered"], figures["ppl_q_stderr"])
    assert undefined == (None, None, None), "of one position"


def test_infinite_divergences_are_counted_and_spare_other_figures():
    kld = [0.0, 1.0, 2.0, math.inf, math.inf]
    figures = statistics(positions(5, kld=kld, reverse_kld=[0, 0, 0, 0, math.inf]), [3, 2], first_window=7)
    assert (figures["num_infinite_kld"], figures["num_infinite_reverse_kld"]) == (2, 1)
    assert [figures["kld"][name] for name in ("mean", "stderr", "stderr_clustered", "max", "p99")] == [None] * 5
    assert (figures["kld"]["median"], figures["kld"]["min"], figures["kld"]["p10"]) == (2.0, 0.0, pytest.approx(0.4))
    assert (figures["reverse_kld_mean"], figures["top_1_percent_share"]) == (None, None)
    assert figures["most_divergent"] == [
        {"index": 3, "window": 8, "kld": None},
        {"index": 4, "window": 8, "kld": None},
        {"index": 2, "window": 7, "kld": 2.0},
        {"index": 1, "window": 7, "kld": 1.0},
    ]


def test_an_impossible_token_makes_only_the_perplexity_infinite():
    figures = statistics(positions(3, logprobs=[-1, -math.inf, -2], reference_logprobs=[-1, -5, -2]), [2, 1])
    assert (figures["ppl_q"], figures["ppl_difference"], figures["ln_ppl_correlation"]) == (None, None, None)
    assert figures["ppl_base"] == pytest.approx(math.exp(8 / 3))
    assert figures["delta_p"]["min"] == pytest.approx(-math.exp(-5))


def test_buckets_of_confidence_include_their_lower_ends():
    confidence = [0, 0.2, 0.25, 0.5, 0.6, 0.75, 0.949, 0.951, 1, 1]
    tokens = {"top_token_ids": [1] * 10, "reference_top_token_ids": [1, 2, 1, 1, 1, 1, 1, 2, 2, 1]}
    figures = statistics(positions(10, reference_confidence=confidence, kld=range(10), **tokens), [10])
    rows = [tuple(bucket.values()) for bucket in figures["confidence_buckets"]]
    assert rows == [
        (0.0, 0.25, 2, 0.2, 0.5, 0.5),
        (0.25, 0.5, 1, 0.1, 2.0, 1.0),
        (0.5, 0.75, 2, 0.2, 3.5, 1.0),
        (0.75, 0.95, 2, 0.2, 5.5, 1.0),
        (0.95, 1.0, 3, 0.3, 8.0, pytest.approx(1 / 3)),
    ]


def test_the_twenty_most_divergent_positions_are_in_order(made_up, figures):
    order = sorted(range(1999), key=lambda at: (-made_up.kld[at], at))[:20]
    windows = [window for window, size in enumerate(SIZES) for _ in range(size)]
    assert figures["most_divergent"] == [
        {"index": at, "window": windows[at], "kld": float(made_up.kld[at])} for at in order
    ]


@pytest.mark.parametrize(
    ("refused", "sizes", "message"),
    [(positions(5), [2, 2], "5 positions in windows of 4"), (positions(2, kld=[0, math.nan]), [2], "NaN")],
)
def test_what_does_not_fit_and_nan_are_refused(refused, sizes, message):
    with pytest.raises(ValueError, match=message):
        statistics(refused, sizes)
