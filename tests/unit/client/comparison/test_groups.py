"""Figures by class, domain and context: against means by hand, in every form, and only where there are several."""

import math
from dataclasses import replace

import numpy as np
import pytest
from run_files import kld_run, made_up_kld, made_up_nlls, perplexity_run
from scipy import stats

from scoremode.comparison import as_csv, as_text, compare
from scoremode.comparison.report import write_report

WINDOWS = np.arange(30, dtype=np.int32)
POSITIONS = np.arange(3000)
IN_WINDOW = POSITIONS % 100
CONTEXTS = np.where(WINDOWS % 2, 5000, 200).astype(np.int32)
# Reasoning, then text; tool calls in five documents alone.
CLASSES = np.where(POSITIONS < 500, 2 * (IN_WINDOW > 89), IN_WINDOW < 40).astype(np.uint8)
PARTS = {
    "window_contexts": CONTEXTS,
    "window_documents": WINDOWS,
    "window_labels": np.where(WINDOWS % 3 == 0, 0, 2).astype(np.int32),
    "labels": ["code", "unused", "a|b"],
    "classes": CLASSES,
}
# Ten documents are code, twenty are not; there are fifteen of each context.
WITH_INTERVALS = {("class", "text"), ("class", "reasoning"), ("domain", "a|b")}
BEFORE = np.repeat(CONTEXTS, 100) + IN_WINDOW
MEMBERS = {
    ("class", "text"): CLASSES == 0,
    ("class", "reasoning"): CLASSES == 1,
    ("class", "tool call"): CLASSES == 2,
    ("domain", "code"): POSITIONS // 100 % 3 == 0,
    ("domain", "a|b"): POSITIONS // 100 % 3 > 0,
    ("tokens before", "0 to 255"): BEFORE < 256,
    ("tokens before", "256 to 1,023"): (BEFORE >= 256) & (BEFORE < 1024),
    ("tokens before", "4,096 to 16,383"): BEFORE >= 4096,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base whose file knows no parts, and two runs that diverge from a reference, whose files do."""
    folder = tmp_path_factory.mktemp("runs")
    others = [kld_run(folder, f"int{seed}", made_up_nlls(seed), made_up_kld(seed, 0.05)) for seed in (8, 4)]
    base = replace(perplexity_run(folder, "base", made_up_nlls(1)), window_contexts=None)
    return [base, *(replace(run, **PARTS) for run in others)]


@pytest.fixture(scope="module")
def comparison(runs):
    return compare(runs, num_resamples=500)


def test_each_group_has_the_means_of_its_tokens(runs, comparison):
    found = {(group.by, group.name, each.run.label): (group, each) for group, each in comparison.groups}
    assert list(found) == [(*group, run.label) for group in MEMBERS for run in runs]
    base = runs[0]
    for (by, name, _), (group, each) in found.items():
        members, run = MEMBERS[by, name], each.run
        assert group.num_scored == members.sum()
        assert each.perplexity.value == pytest.approx(math.exp(run.nlls[members].mean()))
        assert each.perplexity.stderr == pytest.approx(each.perplexity.value * stats.sem(run.nlls[members]))
        has_interval = (by, name) in WITH_INTERVALS
        assert (each.perplexity.low is not None) == has_interval
        if run is base:
            assert (each.ppl_ratio, each.kld, each.same_top_p) == (None, None, None)
            continue
        assert each.ppl_ratio.value == pytest.approx(math.exp((run.nlls - base.nlls)[members].mean()))
        assert each.kld.value == pytest.approx(run.kld[members].mean())
        assert each.same_top_p.value == pytest.approx((run.kld < 0.1)[members].mean())
        if has_interval:
            assert each.ppl_ratio.low < each.ppl_ratio.value < each.ppl_ratio.high
            # Here tokens are independent, so that both errors are of one size.
            assert each.kld.high - each.kld.low == pytest.approx(2 * 2.05 * each.kld.stderr, rel=0.4)


def test_every_form_has_the_groups(runs, comparison, tmp_path):
    each = next(each for group, each in comparison.groups if (group.name, each.run.label) == ("reasoning", "int8"))
    ratio = f"{each.ppl_ratio.value:.4f} ± {each.ppl_ratio.stderr:.4f} [{each.ppl_ratio.low:.4f}"
    kld = f"{each.kld.value:.6f} ± {each.kld.stderr:.6f} [{each.kld.low:.6f}"
    text = as_text(comparison)
    note = "Without an interval: groups with tokens in fewer than 20 of the documents or windows drawn."
    assert all(part in text for part in (ratio, kld, note))
    assert "Seed 0: 30 documents drawn one by one, 500 resamples." in text
    assert any(line.split()[:3] == ["a|b", "2,000", "int4"] for line in text.splitlines())
    assert "reasoning" in as_csv(comparison)
    write_report(comparison, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert all(part in html for part in (ratio, kld, note, '<a href="#groups">', "By tokens before: mean KLD, nats"))
