"""Limits for pipelines: each row that is shown keeps to them, and a figure that cannot tell fails."""

import math
from dataclasses import replace

import numpy as np
import pytest
from run_files import OWN, kld_run, made_up_kld, made_up_nlls, made_up_reference, perplexity_run

from scoremode.comparison import compare, summary
from scoremode.comparison.figures import EngineLog, Figure, RunFigures
from scoremode.comparison.summary import exceeded_limits
from scoremode.errors import RunError
from scoremode.wire import LOWEST_LOGPROB

NLLS = made_up_nlls(0)
"""The reference's."""
KLD = made_up_kld(1, 0.1)
PERPLEXITY = math.exp(NLLS.mean())
INFINITE = np.where(np.arange(len(NLLS)) == 5, -LOWEST_LOGPROB, NLLS)
"""As JSON has an infinite NLL."""


def shown(tmp_path, perplexity=20.0, kld=0.1, base=None):
    """A comparison of a run that keeps to every limit, with another engine's log."""
    of_ln_ppl, of_ppl, of_kld = (
        value and Figure(value, None, None, None) for value in (math.log(perplexity), perplexity, kld)
    )
    engine_log = EngineLog("llama.cpp", None, "gguf", base, None, None)
    comparison = compare([kld_run(tmp_path, "int8", NLLS, KLD)], num_resamples=100)
    return replace(comparison, logs=[RunFigures(engine_log, of_ln_ppl, of_ppl, kld=of_kld)])


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
        (np.full(3000, 2.0), np.full(3000, 2.5), "worse", "+64.9 ± 0.0 % PPL: worse"),
        (np.full(3000, 2.0), np.full(3000, 1.5), "worse", None),
        (np.full(3000, 2.0), np.full(3000, 1.5), "differs", "-39.3 ± 0.0 % PPL: better"),
    ],
)
def test_a_pair_without_an_interval_fails_unless_all_tokens_agree(tmp_path, base, other, fail_if, reason):
    runs = [perplexity_run(tmp_path, "base", base), perplexity_run(tmp_path, "other", other)]
    comparison = compare(runs, num_resamples=100)
    lines = exceeded_limits(comparison, fail_if)
    assert [line.split(": ", 2)[:2] for line in lines] == [[f"--fail-if {fail_if}", "other"]] * (reason is not None)
    assert all(line.endswith(reason) for line in lines)
    assert comparison.pairs[0].ln_ppl_ratio.low is None
    assert summary(comparison)


@pytest.mark.parametrize(
    ("figures", "limits", "line"),
    [
        ({"kld": 5.0}, {"max_kld": 0.5}, "--max-kld 0.5: gguf: perplexity 20.0, KLD 5.00"),
        ({"kld": math.nan}, {"max_kld": 0.5}, "--max-kld 0.5 (the mean is nan): gguf: "),
        ({"kld": -math.inf}, {"max_kld": 0.5}, "--max-kld 0.5"),
        ({"perplexity": 1.03 * PERPLEXITY}, {"max_ppl_increase": 2}, "--max-ppl-increase 2: gguf: "),
        ({"perplexity": math.inf}, {"max_ppl_increase": 2}, "--max-ppl-increase 2: gguf: "),
        # 10 % worse than its own base, and not at all than ours.
        *(
            ({"perplexity": PERPLEXITY, "base": PERPLEXITY / 1.1}, {"max_ppl_increase": most}, line)
            for most, line in ((2, "--max-ppl-increase 2: gguf: "), (10.1, None))
        ),
        ({"perplexity": 0.9 * PERPLEXITY}, {"max_ppl_increase": 2}, None),
    ],
)
def test_a_log_keeps_to_the_limits(tmp_path, figures, limits, line):
    lines = exceeded_limits(shown(tmp_path, **figures), **limits)
    assert [each.startswith(line) for each in lines] == [True] * (line is not None)


@pytest.mark.parametrize(
    ("kld", "limits", "message"),
    [
        (None, {"max_kld": 0.5}, "--max-kld: gguf has no KL divergence"),
        (0.1, {"fail_if": "worse"}, "--fail-if cannot be checked: gguf is a log, which has no interval"),
    ],
)
def test_a_log_that_cannot_be_checked_is_an_error(tmp_path, kld, limits, message):
    with pytest.raises(RunError, match=message):
        exceeded_limits(shown(tmp_path, kld=kld), **limits)


@pytest.mark.parametrize(("most", "num_lines"), [(0.5, 0), (0.05, 1)])
def test_logs_alone_can_keep_to_a_limit(tmp_path, most, num_lines):
    """Next to a run that has neither a base nor a divergence."""
    plain = compare([perplexity_run(tmp_path, "plain", NLLS)], num_resamples=100)
    assert len(exceeded_limits(replace(plain, logs=shown(tmp_path).logs), max_kld=most)) == num_lines


def test_the_base_keeps_to_the_limits_too(tmp_path):
    """With two references it is the first run."""
    first, second = (made_up_reference(fingerprint=name) for name in ("first", "second"))
    runs = [
        kld_run(tmp_path, "far", NLLS, 50 * KLD, reference=first),
        kld_run(tmp_path, "near", NLLS, KLD, reference=second),
    ]
    [line] = exceeded_limits(compare(runs, num_resamples=100), max_kld=0.5)
    assert line.startswith("--max-kld 0.5: far: ")
    runs = [perplexity_run(tmp_path, name, nlls) for name, nlls in (("endless", INFINITE), ("finite", NLLS))]
    [line] = exceeded_limits(compare(runs, num_resamples=100), max_ppl_increase=2)
    assert line.startswith("--max-ppl-increase 2: finite: -100")


@pytest.mark.parametrize(("kld", "nats"), [(np.zeros(3000), "0"), (np.full(3000, 0.75), "0.750")])
def test_the_references_own_model_alone_is_the_base_itself(tmp_path, kld, nats):
    comparison = compare([kld_run(tmp_path, "m", NLLS, kld, server=OWN)], num_resamples=100)
    assert summary(comparison)[0] == f"m is the reference's own model: it is the base itself, {nats} nats from it."
    assert exceeded_limits(comparison, "worse", max_ppl_increase=0) == []
    assert len(exceeded_limits(comparison, max_kld=0.5)) == (nats != "0")
