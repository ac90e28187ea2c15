"""Limits for pipelines: each row that is shown keeps to them, and a figure that cannot tell fails."""

import math
from dataclasses import replace

import numpy as np
import pytest
from run_files import OWN, kld_run, made_up_kld, made_up_nlls, made_up_reference, perplexity_run

from scoremode.comparison import compare, summary, verdict_line
from scoremode.comparison.figures import EngineLog, Figure, RunFigures
from scoremode.comparison.summary import exceeded_limits
from scoremode.errors import RunError
from scoremode.wire import LOWEST_LOGPROB

NLLS = made_up_nlls(0)
"""The reference's."""
KLD = made_up_kld(1, 0.1)
INFINITE = np.where(np.arange(len(NLLS)) == 5, -LOWEST_LOGPROB, NLLS)
"""As JSON has an infinite NLL."""


def log(perplexity=21.0, kld=0.1, base=None, label="gguf"):
    figure = None if kld is None else Figure(kld, None, None, None)
    of_engine = EngineLog(None, label, base, None, None, None, 8, 512)
    return RunFigures(
        of_engine, Figure(math.log(perplexity), None, None, None), Figure(perplexity, None, None, None), kld=figure
    )


@pytest.mark.parametrize(
    ("base", "other", "fail_if", "reason"),
    [
        (NLLS, INFINITE, "worse", "∞ % PPL: no interval, as the NLL of a token is infinite in other"),
        (NLLS, INFINITE, "differs", "no interval, as the NLL of a token is infinite in other"),
        (INFINITE, NLLS, "worse", "no interval, as the NLL of a token is infinite in base"),
        (INFINITE, INFINITE, "worse", "no interval, as the NLL of a token is infinite in base and in other"),
        (NLLS, NLLS, "worse", None),
        (NLLS, NLLS, "differs", None),
        (np.full(3000, 2.0), np.full(3000, 2.0), "differs", None),
        (np.full(3000, 2.0), np.full(3000, 2.5), "worse", "+64.9 % PPL ± 0.0: worse"),
        (np.full(3000, 2.0), np.full(3000, 1.5), "worse", None),
        (np.full(3000, 2.0), np.full(3000, 1.5), "differs", "-39.3 % PPL ± 0.0: better"),
    ],
)
def test_a_pair_without_an_interval_fails_unless_all_tokens_agree(tmp_path, base, other, fail_if, reason):
    runs = [perplexity_run(tmp_path, "base", base), perplexity_run(tmp_path, "other", other)]
    comparison = compare(runs, num_resamples=100)
    lines = exceeded_limits(comparison, fail_if)
    assert [line.split(": ", 2)[:2] for line in lines] == [[f"--fail-if {fail_if}", "other"]] * (reason is not None)
    assert all(line.endswith(reason) for line in lines)
    [pair] = comparison.pairs
    assert pair.ln_ppl_ratio.low is None
    assert summary(comparison)


def test_every_row_keeps_to_the_largest_divergence(tmp_path):
    """The base too: with two references it is the first run."""
    other = made_up_reference(fingerprint="another")
    first = kld_run(tmp_path, "first", NLLS, 50 * KLD)
    comparison = compare([first, kld_run(tmp_path, "second", NLLS, KLD, reference=other)], num_resamples=100)
    assert comparison.base.label == "first"
    values = {"far": 5.0, "near": 0.1, "undefined": math.nan, "negative": -math.inf}
    shown = replace(comparison, logs=[log(kld=value, label=label) for label, value in values.items()])
    lines = exceeded_limits(replace(shown, max_kld=0.5))
    assert [line.split(": ")[1] for line in lines] == ["first", "far", "undefined", "negative"]
    assert lines[1] == "--max-kld 0.5: far: perplexity 21.0, KLD 5.00: beyond 0.5 KLD by the value alone"
    assert lines[2].startswith("--max-kld 0.5 (the mean is nan): undefined: ")
    with pytest.raises(RunError, match="--max-kld: gguf has no KL divergence"):
        exceeded_limits(replace(comparison, logs=[log(kld=None)], max_kld=0.5))


def test_every_row_keeps_to_the_largest_increase_of_perplexity(tmp_path):
    comparison = compare([kld_run(tmp_path, "int8", NLLS, KLD)], num_resamples=100)
    base = comparison.runs[0].perplexity.value
    # The second log is 10 % worse than its own base, and equal to ours.
    logs = [log(1.03 * base), log(base, base=base / 1.1, label="own base"), log(0.9 * base, label="better")]
    lines = exceeded_limits(replace(comparison, logs=[*logs, log(math.inf, label="inf")], max_ppl_increase=2))
    assert [line.split(": ")[:2] for line in lines] == [
        ["--max-ppl-increase 2", label] for label in ("gguf", "own base", "inf")
    ]
    assert exceeded_limits(replace(comparison, logs=logs, max_ppl_increase=10.1)) == []
    runs = [perplexity_run(tmp_path, name, nlls) for name, nlls in (("endless", INFINITE), ("finite", NLLS))]
    [line] = exceeded_limits(compare(runs, max_ppl_increase=2, num_resamples=100))
    assert line.startswith("--max-ppl-increase 2: finite: -100")


def test_a_log_has_no_verdict(tmp_path):
    comparison = replace(compare([kld_run(tmp_path, "int8", NLLS, KLD)], num_resamples=100), logs=[log()])
    with pytest.raises(RunError, match=r"--fail-if cannot be checked: gguf is a log, which has no interval"):
        exceeded_limits(comparison, "worse")
    # Logs alone can keep to a limit, next to a run that has neither a base nor a divergence.
    alone = replace(compare([perplexity_run(tmp_path, "plain", NLLS)], num_resamples=100), logs=[log()])
    assert exceeded_limits(replace(alone, max_kld=0.5)) == []
    assert len(exceeded_limits(replace(alone, max_kld=0.05))) == 1


def test_a_tolerance_is_kept_by_the_whole_interval_or_not_decided(tmp_path):
    """The exit status is by the value, as without intervals."""
    run = kld_run(tmp_path, "int8", NLLS + 0.02 + 0.1 * made_up_nlls(7), KLD)
    figures = compare([run], num_resamples=100).runs[1]
    change, kld = figures.ppl_change, figures.kld
    for name, unit, scale, figure in (("max_ppl_increase", "% PPL", 100, change), ("max_kld", "KLD", 1, kld)):
        ends = {
            "within": 1.01 * figure.high,
            "the interval does not decide on": (figure.value + figure.high) / 2,
            "beyond": 0.99 * figure.low,
        }
        for words, end in ends.items():
            comparison = compare([run], **{name: scale * end}, num_resamples=100)
            line = verdict_line(comparison, comparison.runs[1])
            assert line.endswith(f": {words} {scale * end:g} {unit}")
            assert f"{line}." in summary(comparison)
            assert len(exceeded_limits(comparison)) == (words == "beyond")


@pytest.mark.parametrize(("kld", "nats"), [(np.zeros(3000), "0"), (np.full(3000, 0.75), "0.750")])
def test_the_references_own_model_alone_is_the_base_itself(tmp_path, kld, nats):
    comparison = compare([kld_run(tmp_path, "m", NLLS, kld, server=OWN)], num_resamples=100)
    assert summary(comparison)[0] == f"m is the base, as the reference's own model; {nats} nats from the reference."
    assert exceeded_limits(replace(comparison, max_ppl_increase=0), "worse") == []
    assert len(exceeded_limits(replace(comparison, max_kld=0.5))) == (nats != "0")
