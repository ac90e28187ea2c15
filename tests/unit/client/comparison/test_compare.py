"""Figures and verdicts against scipy, against the figures that the runs themselves have, and by hand."""

import json
import math

import numpy as np
import pytest
from run_files import WINDOW_SIZES, made_up_nlls, made_up_reference, write_kld_run, write_perplexity_run
from scipy import stats

from scoremode.comparison import compare, load_run
from scoremode.metrics import perplexity


def run_of(tmp_path, name, nlls, **changes):
    return load_run(write_perplexity_run(tmp_path / f"{name}.json", nlls, **changes), name)


def kld_run_of(tmp_path, name, nlls, kld, **changes):
    return load_run(write_kld_run(tmp_path / f"{name}.json", nlls, kld, **changes), name)


def made_up_kld(seed, mean):
    num_scored = sum(WINDOW_SIZES)
    return np.random.default_rng([seed, 99]).exponential(mean, num_scored).astype(np.float32).astype(np.float64)


def test_a_runs_own_figures_are_those_that_it_was_written_with(tmp_path):
    run = run_of(tmp_path, "one", made_up_nlls(1))
    [figures] = compare([run], num_resamples=100).runs
    record = json.loads(run.path.read_text())
    # Sums in another order.
    for figure, name in [(figures.nll, "nll_mean"), (figures.perplexity, "perplexity")]:
        assert figure.value == pytest.approx(record[name], rel=1e-12)
    assert figures.nll.stderr == pytest.approx(record["nll_stderr"], rel=1e-9)
    assert figures.perplexity.stderr == pytest.approx(record["perplexity_stderr"], rel=1e-9)
    assert figures.bits_per_byte.value == pytest.approx(record["bits_per_byte"], rel=1e-12)
    assert (figures.kld, figures.kld_median, figures.same_top_p, figures.kld_over_noise_floor) == (None,) * 4
    assert figures.perplexity.low == pytest.approx(math.exp(figures.nll.low))
    assert figures.perplexity.low < figures.perplexity.value < figures.perplexity.high


def test_bits_per_byte_of_a_method_that_does_not_score_every_token(tmp_path):
    run = run_of(tmp_path, "one", made_up_nlls(1), method="llama.cpp", stride=128)
    [figures] = compare([run], num_resamples=100).runs
    assert figures.bits_per_byte.value == pytest.approx(json.loads(run.path.read_text())["bits_per_byte"], rel=1e-12)


def test_a_run_against_a_reference_has_the_figures_that_it_was_written_with(tmp_path):
    reference = made_up_reference(noise_floor=0.05)
    run = kld_run_of(tmp_path, "one", made_up_nlls(1), made_up_kld(1, 0.2), reference=reference)
    [figures] = compare([run], num_resamples=100).runs
    record = json.loads(run.path.read_text())
    statistics = record["statistics"]
    assert figures.kld.value == statistics["kld"]["mean"]
    assert figures.kld.stderr == statistics["kld"]["stderr"]
    assert (figures.kld_median, figures.kld_p99, figures.kld_max) == tuple(
        statistics["kld"][name] for name in ("median", "p99", "max")
    )
    assert (figures.same_top_p.value, figures.same_top_p.stderr) == (
        statistics["same_top_p"],
        statistics["same_top_p_stderr"],
    )
    assert figures.kld_over_noise_floor == pytest.approx(record["kld_over_noise_floor"])


def test_errors_that_take_tokens_as_independent_are_scipys(tmp_path):
    first, second = made_up_nlls(1), made_up_nlls(2, shift=0.01)
    kld = made_up_kld(1, 0.1), made_up_kld(2, 0.11)
    runs = [kld_run_of(tmp_path, str(n), nlls, kld[n]) for n, nlls in enumerate((first, second))]
    comparison = compare(runs, num_resamples=100)
    assert comparison.runs[0].nll.stderr == pytest.approx(stats.sem(first), rel=1e-12)
    assert comparison.runs[0].kld.stderr == pytest.approx(stats.sem(kld[0]), rel=1e-12)
    [pair] = comparison.pairs
    paired = stats.ttest_rel(second, first)
    assert pair.ln_ppl_ratio.value == pytest.approx(second.mean() - first.mean(), rel=1e-9)
    assert pair.ln_ppl_ratio.value / pair.ln_ppl_ratio.stderr == pytest.approx(paired.statistic, rel=1e-9)
    assert pair.kld_difference.value / pair.kld_difference.stderr == pytest.approx(
        stats.ttest_rel(kld[1], kld[0]).statistic, rel=1e-9
    )
    assert pair.ppl_ratio.value == pytest.approx(perplexity(second).perplexity / perplexity(first).perplexity)
    assert pair.ppl_ratio.stderr == pytest.approx(pair.ppl_ratio.value * pair.ln_ppl_ratio.stderr)
    assert (pair.ppl_ratio.low, pair.ppl_ratio.high) == pytest.approx(
        (math.exp(pair.ln_ppl_ratio.low), math.exp(pair.ln_ppl_ratio.high))
    )


def test_the_error_of_a_difference_of_perplexities_is_the_delta_methods(tmp_path):
    first, second = made_up_nlls(1), made_up_nlls(2, shift=0.2)
    [pair] = compare([run_of(tmp_path, str(n), nlls) for n, nlls in enumerate((first, second))]).pairs
    gradient = np.array([-math.exp(first.mean()), math.exp(second.mean())])
    covariance = np.cov(first, second) / len(first)
    assert pair.ppl_difference.value == pytest.approx(math.exp(second.mean()) - math.exp(first.mean()))
    # `standard_error` divides by n - 1 after a mean: the same as numpy's.
    assert pair.ppl_difference.stderr == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=1e-9)
    assert pair.ppl_difference.low < pair.ppl_difference.value < pair.ppl_difference.high


@pytest.mark.parametrize(
    ("shift", "verdict"), [(-0.05, "better"), (0.05, "worse"), (0.0, "no difference shown")], ids=str
)
def test_verdicts_are_on_the_second(tmp_path, shift, verdict):
    runs = [run_of(tmp_path, "one", made_up_nlls(1)), run_of(tmp_path, "two", made_up_nlls(2, shift=shift))]
    [pair] = compare(runs).pairs
    assert pair.verdict == verdict
    assert (pair.ln_ppl_ratio.low < 0, pair.ln_ppl_ratio.high > 0) == (verdict != "worse", verdict != "better")
    assert (pair.kld_difference, pair.kld_verdict) == (None, None)


def test_a_difference_is_shown_that_single_intervals_hide(tmp_path):
    """Both perplexities are uncertain by far more than what they differ by, but on the same tokens."""
    runs = [run_of(tmp_path, "one", made_up_nlls(1)), run_of(tmp_path, "two", made_up_nlls(2, shift=0.05))]
    comparison = compare(runs)
    one, two = comparison.runs
    assert two.perplexity.low < one.perplexity.value
    assert comparison.pairs[0].verdict == "worse"


def test_every_pair_is_there_the_earlier_run_first(tmp_path):
    runs = [run_of(tmp_path, name, made_up_nlls(n)) for n, name in enumerate("abcd")]
    pairs = [(pair.first.label, pair.second.label) for pair in compare(runs, num_resamples=100).pairs]
    assert pairs == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]


def test_the_same_run_twice_differs_by_nothing(tmp_path):
    runs = [run_of(tmp_path, name, made_up_nlls(1)) for name in "ab"]
    [pair] = compare(runs).pairs
    ratio = pair.ln_ppl_ratio
    assert (ratio.value, ratio.stderr, ratio.low, ratio.high) == (0, 0, 0, 0)
    assert pair.verdict == "no difference shown"


def test_a_seed_decides_the_resamples(tmp_path):
    runs = [run_of(tmp_path, name, made_up_nlls(n)) for n, name in enumerate("ab")]
    first, again, other = (compare(runs, num_resamples=200, seed=seed) for seed in (1, 1, 2))
    assert first.pairs[0].ln_ppl_ratio == again.pairs[0].ln_ppl_ratio
    assert first.pairs[0].ln_ppl_ratio != other.pairs[0].ln_ppl_ratio
    assert (first.num_resamples, first.seed) == (200, 1)
    assert "stationary blocks" in first.blocks


def test_two_equal_models_are_not_told_apart(tmp_path):
    """In 90 of 100 seeds at least: of 95 % intervals that is exceeded with a probability of 1 %, and 100 are fixed."""
    found = []
    for seed in range(100):
        rng = np.random.default_rng([7, seed])
        # Noise of tokens, which the windows have levels of too.
        shifts = 0.1 * (rng.normal(size=3000) + np.repeat(rng.normal(size=30), 100))
        nlls = made_up_nlls(1, shift=1.0)
        runs = [run_of(tmp_path, f"a{seed}", nlls), run_of(tmp_path, f"b{seed}", nlls + shifts)]
        found.append(compare(runs, num_resamples=300, seed=seed).pairs[0].verdict)
    assert found.count("no difference shown") >= 90
    assert found.count("no difference shown") < 100, "an interval that is never too narrow is too wide"


def test_divergences_are_compared_against_one_reference_only(tmp_path):
    nlls, kld = made_up_nlls(1), made_up_kld(1, 0.1)
    runs = [
        kld_run_of(tmp_path, "one", nlls, kld),
        kld_run_of(tmp_path, "two", nlls, 2 * kld),
        kld_run_of(tmp_path, "three", nlls, 2 * kld, reference=made_up_reference(fingerprint="another")),
        run_of(tmp_path, "four", nlls),
    ]
    verdicts = {(pair.first.label, pair.second.label): pair.kld_verdict for pair in compare(runs).pairs}
    assert verdicts.pop(("one", "two")) == "worse"
    assert set(verdicts.values()) == {None}


def test_below_the_noise_floor_no_difference_is_shown(tmp_path):
    nlls, kld = made_up_nlls(1), made_up_kld(1, 0.1)
    klds = {"low": 0.3 * kld, "lower": 0.1 * kld, "high": 2 * kld}
    # The floor was measured after the first of these.
    floors = {"low": None, "lower": 0.05, "high": 0.05}
    runs = [
        kld_run_of(tmp_path, name, nlls, klds[name], reference=made_up_reference(noise_floor=floors[name]))
        for name in klds
    ]
    comparison = compare(runs)
    verdicts = {(pair.first.label, pair.second.label): pair.kld_verdict for pair in comparison.pairs}
    assert verdicts == {("low", "lower"): "no difference shown", ("low", "high"): "worse", ("lower", "high"): "worse"}
    [difference] = [pair.kld_difference for pair in comparison.pairs if pair.second.label == "lower"]
    assert difference.high < 0, "which would be better"
    assert [figures.kld_over_noise_floor for figures in comparison.runs] == pytest.approx(
        [run.kld.mean() / 0.05 for run in runs]
    )


def test_an_infinite_value_has_no_interval_and_no_verdict(tmp_path):
    nlls = made_up_nlls(1)
    infinite = nlls.copy()
    infinite[5] = math.inf
    kld = made_up_kld(1, 0.1)
    infinite_kld = kld.copy()
    infinite_kld[7] = math.inf
    runs = [kld_run_of(tmp_path, "one", nlls, kld), kld_run_of(tmp_path, "two", infinite, infinite_kld)]
    comparison = compare(runs, num_resamples=100)
    two = comparison.runs[1]
    assert (two.perplexity.value, two.perplexity.stderr, two.perplexity.low) == (math.inf, None, None)
    assert (two.kld.value, two.kld.stderr, two.kld.low, two.kld_max) == (math.inf, None, None, math.inf)
    assert two.same_top_p.low is not None
    [pair] = comparison.pairs
    assert (pair.verdict, pair.kld_verdict) == ("no difference shown",) * 2
    assert comparison.runs[0].perplexity.low is not None


def test_divergences_and_shares_stay_where_they_can_be(tmp_path):
    kld = np.zeros(3000)
    kld[50] = 5.0
    [figures] = compare([kld_run_of(tmp_path, "one", made_up_nlls(1), kld)]).runs
    assert figures.kld.low == 0
    assert figures.same_top_p.high == 1


@pytest.mark.parametrize(("shift", "verdict"), [(1e-5, "no difference shown"), (2e-4, "worse"), (-2e-4, "better")])
def test_a_difference_that_could_not_matter_is_not_shown(tmp_path, shift, verdict):
    """As between one model's figures from batches of other shapes: its interval may be ever so narrow."""
    nlls = made_up_nlls(1)
    runs = [run_of(tmp_path, "first", nlls), run_of(tmp_path, "second", nlls + shift)]
    [pair] = compare(runs, num_resamples=200).pairs
    assert pair.ln_ppl_ratio.low == pytest.approx(shift, rel=0.1)
    assert pair.verdict == verdict
