"""Figures and verdicts against scipy, against the figures that the runs have, and by hand; and which runs pair."""

import json
import math

import numpy as np
import pytest
from run_files import (
    OWN,
    WINDOW_SIZES,
    kld_run,
    made_up_kld,
    made_up_nlls,
    made_up_reference,
    made_up_tokens,
    perplexity_run,
)
from scipy import stats

from scoremode.comparison import check_comparable, compare
from scoremode.errors import RunError
from scoremode.metrics import perplexity

NLLS = made_up_nlls(1)


KLD = made_up_kld(1, 0.1)


def test_bits_per_byte_allow_for_a_method_that_does_not_score_every_token(tmp_path):
    run = perplexity_run(tmp_path, "one", NLLS, method="llama.cpp", stride=128)
    [figures] = compare([run], num_resamples=100).runs
    assert figures.bits_per_byte.value == pytest.approx(json.loads(run.path.read_text())["bits_per_byte"], rel=1e-12)


def test_errors_that_take_tokens_as_independent_are_scipys(tmp_path):
    nlls, kld = (NLLS, made_up_nlls(2, shift=0.2)), (KLD, made_up_kld(2, 0.11))
    runs = [kld_run(tmp_path, str(n), nlls[n], kld[n], server=server) for n, server in enumerate((OWN, None))]
    comparison = compare(runs, num_resamples=100)
    first = comparison.runs[0]
    expected = [stats.sem(values) for values in (nlls[0], kld[0], kld[0] < 0.1)]
    assert [each.stderr for each in (first.nll, first.kld, first.same_top_p)] == pytest.approx(expected, rel=1e-12)
    [pair] = comparison.pairs
    for figure, values in ((pair.ln_ppl_ratio, nlls), (pair.kld_difference, kld)):
        assert figure.value == pytest.approx(values[1].mean() - values[0].mean(), rel=1e-9)
        assert figure.value / figure.stderr == pytest.approx(stats.ttest_rel(values[1], values[0]).statistic, rel=1e-9)
    ratio, ln_ratio = pair.ppl_ratio, pair.ln_ppl_ratio
    assert ratio.value == pytest.approx(perplexity(nlls[1]).perplexity / perplexity(nlls[0]).perplexity)
    assert ratio.stderr == pytest.approx(ratio.value * ln_ratio.stderr)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(ln_ratio.low), math.exp(ln_ratio.high)))
    # The delta method for the difference of two perplexities.
    gradient = np.array([-math.exp(nlls[0].mean()), math.exp(nlls[1].mean())])
    stderr = math.sqrt(gradient @ (np.cov(*nlls) / len(nlls[0])) @ gradient)
    assert pair.ppl_difference.value == pytest.approx(gradient.sum())
    assert pair.ppl_difference.stderr == pytest.approx(stderr, rel=1e-9)
    assert pair.ppl_difference.low < pair.ppl_difference.value < pair.ppl_difference.high


# As narrow as an interval of shifted values is, a very small difference is not shown.
@pytest.mark.parametrize(("shift", "verdict"), [(2e-4, "worse"), (-2e-4, "better"), (1e-5, "no difference shown")])
def test_a_verdict_is_on_the_second(tmp_path, shift, verdict):
    """Both perplexities are uncertain by far more than what they differ by, but on the same tokens."""
    runs = [perplexity_run(tmp_path, "one", NLLS), perplexity_run(tmp_path, "two", NLLS + shift)]
    comparison = compare(runs, num_resamples=500)
    [pair], (one, two) = comparison.pairs, comparison.runs
    assert (pair.verdict, pair.kld_difference, pair.kld_verdict) == (verdict, None, None)
    assert two.perplexity.low < one.perplexity.value < two.perplexity.high


def test_divergences_are_compared_against_one_reference_only(tmp_path):
    another = made_up_reference(fingerprint="another")
    runs = [kld_run(tmp_path, "one", NLLS, KLD), kld_run(tmp_path, "two", NLLS, 2 * KLD)]
    runs += [kld_run(tmp_path, "three", NLLS, 2 * KLD, reference=another), perplexity_run(tmp_path, "four", NLLS)]
    verdicts = {(pair.first.label, pair.second.label): pair.kld_verdict for pair in compare(runs).pairs}
    assert verdicts.pop(("one", "two")) == "worse"
    assert set(verdicts.values()) == {None}


def test_below_the_noise_floor_no_difference_is_shown(tmp_path):
    # The floor was measured after the first of these, and again before the last.
    settings = {"low": (0.3, None), "lower": (0.1, 0.05), "high": (2, 0.04)}
    runs = [
        kld_run(tmp_path, name, NLLS, factor * KLD, reference=made_up_reference(noise_floor=floor))
        for name, (factor, floor) in settings.items()
    ]
    comparison = compare(runs)
    verdicts = {(pair.first.label, pair.second.label): pair.kld_verdict for pair in comparison.pairs[3:]}
    assert verdicts == {("low", "lower"): "no difference shown", ("low", "high"): "worse", ("lower", "high"): "worse"}
    [difference] = [pair.kld_difference for pair in comparison.pairs[3:] if pair.second.label == "lower"]
    assert difference.high < 0, "which would be better"
    multiples = [figures.kld_over_noise_floor for figures in comparison.runs[1:]]
    assert multiples == pytest.approx([run.kld.mean() / 0.05 for run in runs])


def test_an_infinite_value_has_no_interval(tmp_path):
    nlls, kld = NLLS.copy(), KLD.copy()
    nlls[5] = kld[7] = math.inf
    runs = [kld_run(tmp_path, "one", NLLS, KLD, server=OWN), kld_run(tmp_path, "two", nlls, kld)]
    comparison = compare(runs, num_resamples=100)
    one, two = comparison.runs
    assert (two.perplexity.value, two.perplexity.stderr, two.perplexity.low) == (math.inf, None, None)
    assert (two.kld.value, two.kld.stderr, two.kld.low, two.kld_max) == (math.inf, None, None, math.inf)
    assert None not in (two.same_top_p.low, one.perplexity.low)
    [pair] = comparison.pairs
    assert (pair.verdict, pair.kld_verdict) == ("no interval",) * 2


def test_intervals_end_at_what_a_figure_can_be(tmp_path):
    kld = np.where(np.arange(3000) == 50, 5.0, 0.0)
    [figures] = compare([kld_run(tmp_path, "one", NLLS, kld, server=OWN)]).runs
    assert (figures.kld.low, figures.same_top_p.high) == (0, 1)


OTHER_TOKENS = made_up_tokens()
OTHER_TOKENS[200:] += 1


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"text": "another"}, "the text is text, sha256 e4fcc6171e2a in the first and text, sha256 "),
        ({"nlls": NLLS[:-100], "window_sizes": WINDOW_SIZES[:-1]}, "the number of windows is 30 in the first and 29"),
        ({"window_sizes": [99, 101, *WINDOW_SIZES[2:]]}, "their windows have different numbers of tokens"),
        (
            {"tokens": [0, *OTHER_TOKENS.tolist()]},
            f"2,800 of 3,000 token ids differ, the first in window 2: {OTHER_TOKENS[200] - 1} and {OTHER_TOKENS[200]}",
        ),
    ],
)
def test_an_error_names_both_runs_and_what_differs(tmp_path, changes, difference):
    runs = [perplexity_run(tmp_path, name, NLLS) for name in ("one", "two")]
    with pytest.raises(RunError) as caught:
        check_comparable([*runs, perplexity_run(tmp_path, "x", **{"nlls": NLLS, **changes})])
    assert f"{tmp_path}/one.json and {tmp_path}/x.json cannot be compared: {difference}" in str(caught.value)
    with pytest.raises(RunError, match="2 runs are called 'one'"):
        check_comparable(runs[:1] * 2)


def test_runs_of_two_references_have_the_same_text(tmp_path):
    other = made_up_reference(text_fingerprint="another")
    with pytest.raises(RunError, match="the text is text of the text in the first and text another in"):
        check_comparable([kld_run(tmp_path, "one", NLLS, KLD), kld_run(tmp_path, "two", NLLS, KLD, reference=other)])
