"""The base of a comparison: the same verdicts wherever the original's run comes, or if it has none."""

from dataclasses import fields

import numpy as np
import pytest
from run_files import OWN, kld_run, made_up_kld, made_up_nlls, made_up_reference, perplexity_run

from scoremode.comparison import compare, summary, verdict_line
from scoremode.comparison.summary import exceeded_limits
from scoremode.errors import RunError

NLLS = {"int8": made_up_nlls(1, shift=0.01), "int4": made_up_nlls(2, shift=0.2)}
KLD = {"int8": made_up_kld(1, 0.01), "int4": made_up_kld(2, 0.1)}


@pytest.fixture
def quantized(tmp_path):
    reference = made_up_reference(model="/home/someone/original")
    return [kld_run(tmp_path, name, NLLS[name], KLD[name], reference=reference) for name in NLLS]


def of_the_original(folder, name="original", **server):
    """A run of the reference's own model, whose values are those that the reference has."""
    nlls = made_up_nlls(0)
    return kld_run(folder, name, nlls, np.zeros(len(nlls)), server={**OWN, **server})


def numbers(pairs):
    """All values of pairs but the runs."""
    return [
        [getattr(pair, each.name) for each in fields(pair) if each.name not in ("first", "second")] for pair in pairs
    ]


@pytest.mark.parametrize("kind", ["kld", "perplexity"])
def test_a_verdict_against_the_reference_is_that_against_a_run_of_its_model(tmp_path, quantized, kind):
    original = of_the_original(tmp_path)
    if kind == "perplexity":
        original = perplexity_run(tmp_path, "original", made_up_nlls(0), server=OWN)
    for runs in (quantized[:1], quantized):
        alone, both = compare(runs), compare([*runs, original])
        assert alone.base.label == both.base.label == "original"
        [one], [two] = numbers(alone.pairs[:1]), numbers(both.pairs[:1])
        # Only a run of kld has a divergence of its own, which is 0.
        assert one[:3] + one[4:5] == two[:3] + two[4:5]
        assert kind == "perplexity" or numbers(alone.pairs) == numbers(both.pairs)


def test_a_label_chooses_the_base(quantized):
    comparison = compare(quantized, base="int4", num_resamples=200)
    assert [each.run.label for each in comparison.runs] == ["int4", "original", "int8"]
    assert {label: pair.verdict for label, pair in comparison.base_pairs.items()} == dict.fromkeys(
        ("original", "int8"), "better"
    )
    assert comparison.command().endswith("--labels int4,int8 --base int4")


def test_of_two_runs_of_the_original_the_first_is_the_base(tmp_path, quantized):
    runs = [*quantized, of_the_original(tmp_path, "one"), of_the_original(tmp_path, "two")]
    comparison = compare(runs, num_resamples=100)
    assert comparison.base.label == "one"
    assert (
        summary(comparison)[0]
        == "one and two are all of the reference's model: one is the base; --base chooses another."
    )


def test_a_copy_of_the_original_is_a_run_like_any_other(tmp_path, quantized):
    copy = of_the_original(tmp_path, "float16", fingerprint="of the copy", dtype="float16")
    assert [each.run.label for each in compare([copy, *quantized], num_resamples=100).runs] == [
        *("bytes", "float16"),
        *("int8", "int4"),
    ]


def test_a_limit_that_cannot_be_checked_is_an_error(tmp_path, quantized):
    other = perplexity_run(tmp_path, "other", NLLS["int4"])
    with pytest.raises(RunError, match="--max-kld: other has no KL divergence"):
        exceeded_limits(compare([*quantized, other], max_kld=1, num_resamples=100))
    short = [perplexity_run(tmp_path, name, NLLS["int4"][:100], window_sizes=[100]) for name in ("one", "two")]
    with pytest.raises(RunError, match="--fail-if cannot be checked: no intervals: a text of"):
        exceeded_limits(compare(short, num_resamples=100), fail_if="worse")


def test_a_measured_run_has_its_effect_in_a_line_and_no_verdict(quantized):
    comparison = compare(quantized)
    change = 100 * np.expm1((NLLS["int8"] - made_up_nlls(0)).mean())
    ratio = comparison.runs[1].ppl_ratio
    ends = ", ".join(f"{100 * (end - 1):.1f}" for end in (ratio.low, ratio.high))
    same = 100 * (KLD["int8"] < 0.1).mean()
    line = f"int8: {change:+.1f} % PPL [{ends}], KLD {KLD['int8'].mean():.4f}, same top {same:.1f} %"
    assert verdict_line(comparison, comparison.runs[1]) == line
    sentences = summary(comparison)
    assert f"{line}." in sentences
    # Verdicts are on copies, never on one and the original, though CI and CSV files have them.
    assert [pair.verdict for pair in comparison.pairs] == ["worse"] * 3
    assert [sentence for sentence in sentences if "original" in sentence and "worse" in sentence] == []
    assert "int4 is worse than int8 by perplexity." in sentences
    words = {(pair.second.label, pair.first.label): pair.in_words(pair.verdict) for pair in comparison.pairs}
    assert (words["int8", "original"], words["int4", "int8"]) == ("-", "worse")
    assert verdict_line(compare(quantized, base="int8"), compare(quantized, base="int8").runs[2]).endswith(" %: worse")


@pytest.mark.parametrize(
    ("quantization", "has_words"), [(("awq", None), False), ((None, "awq"), False), ((None, None), True)]
)
def test_without_a_reference_what_is_not_quantized_is_the_original(tmp_path, quantization, has_words):
    runs = [
        perplexity_run(tmp_path, name, NLLS[name], server={"quantization": each})
        for name, each in zip(("int8", "int4"), quantization, strict=True)
    ]
    comparison = compare(runs, num_resamples=100)
    assert verdict_line(comparison, comparison.runs[1]).endswith("]: worse" if has_words else "]")
