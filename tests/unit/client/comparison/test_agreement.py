"""The agreement of answers: figures worked by hand and their intervals, and where a comparison shows them."""

import math
from pathlib import Path

import numpy as np
import pytest
from fake_server import INFO
from made_up_runs import made_up_reference, write_kld_run
from run_files import OWN
from scipy import stats
from statsmodels.duration.survfunc import SurvfuncRight

from scoremode.comparison import RunFile, as_csv, as_text, card, compare, load_run, summary, verdict_line
from scoremode.comparison.agreement import (
    Agreement,
    _share,
    agreement_figures,
    agreement_of,
    answer_counts,
    expected_lengths,
)
from scoremode.comparison.bootstrap import exact_interval
from scoremode.comparison.plot_style import LIGHT, as_svg
from scoremode.comparison.plots import plots
from scoremode.comparison.report import write_report
from scoremode.comparison.report_tables import parted_answers
from scoremode.errors import RunError
from scoremode.kld import agreement_lengths, num_ties
from scoremode.wire import NoiseFloor, ReferenceAnswers, ServerInfo, WindowOrigins

SIZES = [4, 4, 4, 2, 4]
LENGTHS = [4, 1, 2, 2, 2]
"""Tokens before the first difference. The first difference is token 2 of one answer, of five that have so many and
agree before, and token 3 of two, of three (the answer of two tokens is not among them):
shares of answers that are the same for 1, 2, 3 tokens: 1, 4/5, 4/5 * 1/3."""
FIGURES = {"agreement_p10": 1, "agreement_p25": 2, "agreement_median": 2, "agreement_p75": np.inf}


def run_of(
    path: Path, lengths, sizes=SIZES, *, floor=None, server=None, answers=None, top_ties=None, original=None, **arrays
) -> RunFile:
    """A run on answers of which the second prompt has none. `original` and `server` have fields of both models."""
    num_scored, places = sum(sizes), np.concatenate([np.arange(size) for size in sizes])
    is_same = places != np.repeat(lengths, sizes)
    values = {
        **dict.fromkeys(("kld", "reverse_kld", "acceptance", "reference_confidence"), np.full(num_scored, 0.5)),
        **dict.fromkeys(("token_ids", "reference_top_token_ids"), np.full(num_scored, 7)),
        **dict.fromkeys(("ranks", "reference_ranks"), np.ones(num_scored)),
        **dict.fromkeys(("logprobs", "reference_logprobs"), np.full(num_scored, -1.0)),
        "top_token_ids": np.where(is_same, 7, 8),
        **arrays,
    }
    answers = answers or ReferenceAnswers(max_new_tokens=4, num_answers=len(sizes) + 1)
    of_floor = floor and NoiseFloor(mean=1e-6, p99=0, max=0, num_scored=num_scored, created=1, agreement_lengths=floor)
    origins = WindowOrigins(
        num_context=[3] * len(sizes),
        documents=[0, *range(2, len(sizes) + 1)],
        labels=["a" if index % 2 else "b" for index in range(len(sizes))],
        roles=["assistant"] * len(sizes),
    )
    reference = made_up_reference(
        sizes,
        **{"method": "conversation", "answers": answers, "noise_floor": of_floor, "fingerprint": "of the model"},
        **(original or {}),
    )
    server = ServerInfo(**{**INFO, **(server or {"fingerprint": "of the copy"})})
    texts = {7: "the", 8: "<a>"}
    write_kld_run(
        path, values, sizes, server=server, reference=reference, origins=origins, top_ties=top_ties, texts=texts
    )
    return load_run(path, path.stem)


def test_quantiles_leave_out_answers_that_have_ended(tmp_path):
    run = run_of(tmp_path / "copy.json", LENGTHS)
    assert agreement_of(run).lengths.tolist() == LENGTHS
    tokens, shares = agreement_of(run).survival()
    held = dict(zip(tokens.tolist(), shares.tolist(), strict=True))
    assert [held[0], held[2], held[3], held[4]] == pytest.approx([1, 4 / 5, 4 / 15, 4 / 15])
    figures = agreement_figures(run, None)
    assert {name: figures[name].value for name in FIGURES} == FIGURES
    assert figures["agreement_share"].value == 2 / 5


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.75])
def test_intervals_of_answers_that_all_part_are_scipys_order_statistics(fraction):
    lengths = np.random.default_rng(3).permutation(np.arange(7, 66))
    found = Agreement(lengths, lengths + 1, np.ones(59, bool)).quantile_figure(fraction)
    expected = stats.quantile_test(lengths, p=fraction).confidence_interval()
    assert (found.low, found.high) == (expected.low, expected.high)


def test_the_interval_of_a_curve_is_of_greenwoods_variance():
    random = np.random.default_rng(4)
    sizes = random.integers(1, 9, 60)
    lengths = random.integers(0, sizes + 1)
    agreement = Agreement(lengths, sizes, lengths < sizes)
    tokens, low, high = agreement.survival_intervals()
    oracle = SurvfuncRight(agreement._last, agreement.parts)
    at = [tokens[1:].tolist().index(token) + 1 for token in oracle.surv_times]
    sizes = oracle.surv_prob * (1 - oracle.surv_prob) / oracle.surv_prob_se**2
    expected = [exact_interval(share, size) for share, size in zip(oracle.surv_prob, sizes, strict=True)]
    np.testing.assert_allclose(np.column_stack([low, high])[at], np.minimum.accumulate(expected), rtol=1e-9)


@pytest.mark.parametrize(
    ("lengths", "sizes", "quantiles", "share"),
    [
        # The exact ends are 0.025 to the power of 1 / 60 and 1 / 25: more than 1 of 10 of 25 may part at once.
        ([48] * 60, [48] * 60, [(None, None), (None, None)], (0.9404, 1)),
        ([48] * 25, [48] * 25, [(0, math.inf), (None, None)], (0.8628, 1)),
        ([12] * 25, [48] * 25, [(0, 12), (None, None)], (0, 0.1372)),
        # As `scipy.stats.binomtest(2, 40)` has it; the bootstrap's would cover such a share in 83 of 100.
        ([48] * 2 + [9] * 38, [48] * 40, [(None, None), (None, None)], (0.0061, 0.1692)),
        ([1], [4], [(0, math.inf), (0, math.inf)], (0, 0.975)),
        ([4], [4], [(0, math.inf), (0, math.inf)], (0.025, 1)),
    ],
)
def test_no_interval_is_without_width(lengths, sizes, quantiles, share):
    agreement = Agreement(np.array(lengths), np.array(sizes), np.array(lengths) < sizes)
    found = [agreement.quantile_figure(fraction) for fraction in (0.1, 0.5)]
    assert [(each.low, each.high) for each in found] == quantiles
    figure = _share(agreement)
    assert (figure.low, figure.high) == pytest.approx(share, abs=5e-5)


def test_equal_expectations_of_sampled_answers_have_no_interval(tmp_path):
    sampled = ReferenceAnswers(max_new_tokens=4, num_answers=26, temperature=1, seed=1)
    run = run_of(tmp_path / "run.json", [4] * 25, [4] * 25, answers=sampled)
    found = agreement_figures(run, answer_counts([run], 100, 0))["expected_agreement"]
    assert (found.value, found.low, found.high) == (4, None, None)


@pytest.mark.parametrize(
    ("original", "copy", "lengths", "parts"),
    [
        # Answers 4 4 5 7, 4 7, 7 7 7 4 and 4 9 of at most 4 tokens, of which the third is cut by the limit if 4 ends
        # none. The copy has the same weights.
        ([7, 9], [7, 9], [4, 2, 4, 2], []),
        ([4, 7, 9], [9, 4, 7], [4, 2, 4, 2], []),
        # It continues after 7, but not beyond the limit; what ended the last answer is unknown.
        ([7], [], [4, 2, 4, 2], [1]),
        ([7, 9], [], [4, 2, 4, 2], [1, 3]),
        ([7, 9], [9], [4, 2, 4, 2], [1]),
        # It stops after the first 4 or 5; at the last token both end.
        ([7, 9], [4, 7, 9], [1, 1, 4, 1], [0, 1, 3]),
        ([7, 9], [5, 7, 9], [3, 2, 4, 2], [0]),
        # It stops before a token, and continues elsewhere.
        ([7, 9], [5, 7], [3, 2, 4, 2], [0, 3]),
        (None, [4], [4, 2, 4, 2], []),
        ([7, 9], None, [4, 2, 4, 2], []),
    ],
)
def test_an_answer_parts_where_one_stops_and_the_other_continues(tmp_path, original, copy, lengths, parts):
    sizes, token_ids = [4, 2, 4, 2], np.array([4, 4, 5, 7, 4, 7, 7, 7, 7, 4, 4, 9])
    run = run_of(
        *(tmp_path / "copy.json", sizes, sizes),
        original={"stop_token_ids": original},
        server={"fingerprint": "of the model", "stop_token_ids": copy},
        **dict.fromkeys(("token_ids", "top_token_ids", "reference_top_token_ids"), token_ids),
    )
    agreement = agreement_of(run)
    assert (agreement.lengths.tolist(), np.flatnonzero(agreement.parts).tolist()) == (lengths, parts)
    assert agreement_figures(run, None)["agreement_share"].value == 1 - len(parts) / 4
    # Without the last token of each answer there is no end, and the stops after other tokens count there.
    members = np.array([1, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0], bool)
    before_end = agreement_of(run, members)
    assert np.flatnonzero(before_end.parts).tolist() == [row for row in (0,) if lengths[row] < 3]


def test_what_else_ends_answers_or_renders_chats_is_shown(tmp_path):
    """The copy's generation_config.json lacks an EOS id."""
    run = run_of(
        *(tmp_path / "copy.json", [3, 2], [3, 2]),
        original={"stop_token_ids": [7, 9], "chat_template_fingerprint": "a"},
        server={"fingerprint": "of the model", "stop_token_ids": [9], "chat_template_fingerprint": "b"},
        **dict.fromkeys(("token_ids", "top_token_ids", "reference_top_token_ids"), np.array([8, 8, 7, 8, 9])),
    )
    shown = as_text(compare([run], num_resamples=100))
    assert "1 of 2 answers never part" in shown
    assert "copy continues after token 7" in shown
    assert "copy has another chat template than BF16" in shown
    [parted] = [column.cells for column in parted_answers(run) if column.header == "its top token"]
    assert {*parted} == {"another token"}


def test_windows_without_targets_and_ties_after_the_difference():
    is_same = np.array([1, 1, 0, 0, 1, 1, 0], bool)
    lengths = agreement_lengths(is_same, np.array([3, 0, 3, 1]))
    assert lengths.tolist() == [2, 0, 0, 0]
    # A tie within, one where it parts, and two after.
    assert num_ties(np.array([1, 0, 1, 0, 1, 1, 0], bool), lengths, np.array([3, 0, 3, 1])) == 2


def test_sampled_answers_have_the_expectation_of_the_best_coupling(tmp_path):
    """Ratios 1/2, 1, 1/4 and 2, 1: 1/2 + 1/2 + 1/8 and 1 + 1."""
    sampled = ReferenceAnswers(max_new_tokens=4, num_answers=3, temperature=1, seed=1)
    values = {"logprobs": np.log([0.25, 0.5, 0.125, 1.0, 0.5]), "reference_logprobs": np.log([0.5] * 5)}
    figures = agreement_figures(run_of(tmp_path / "run.json", [0, 0], [3, 2], answers=sampled, **values), None)
    assert figures.keys() == {"expected_agreement"}
    assert figures["expected_agreement"].value == pytest.approx((9 / 8 + 2) / 2)
    # A run that stops after the second and the first token: 1/2 + 1/2 and 1.
    values |= {"token_ids": np.array([7, 9, 7, 9, 7])}
    stops = {"original": {"stop_token_ids": [1]}, "server": {"stop_token_ids": [1, 9]}}
    run = run_of(tmp_path / "run.json", [0, 0], [3, 2], answers=sampled, **stops, **values)
    assert expected_lengths(run).tolist() == pytest.approx([1, 1])


@pytest.fixture
def comparison(tmp_path):
    """25 answers and the floor, whose own model parts once."""
    floor = [4, 0, *([4, 4, 2, 4, 4, 4] * 4)]
    ties = np.tile([1, 0, 0, 0] * 3 + [0, 0] + [1, 1, 1, 1], 5)
    copy = run_of(tmp_path / "copy.json", LENGTHS * 5, SIZES * 5, floor=floor, top_ties=ties)
    return compare([copy, run_of(tmp_path / "own.json", SIZES * 5, SIZES * 5, server=OWN)], num_resamples=200)


def test_figures_have_intervals_and_are_shown_in_every_form(comparison, tmp_path):
    own, copy = comparison.runs
    assert own.run.label == "own"
    assert {name: getattr(copy, name).value for name in FIGURES} == FIGURES
    assert 1 <= copy.agreement_median.low <= 2 <= copy.agreement_median.high
    assert 0.15 < copy.agreement_share.low < 0.4 < copy.agreement_share.high < 0.65
    # Each of the first, second and third answers has a tie at its first token; of the fifth three are within.
    assert copy.agreement_ties == 5 * (3 + 3)
    assert {group.name: figures.agreement_share.value for group, figures in comparison.groups if figures is not own}
    assert "No answer of own parts from that of BF16, of 25." in summary(comparison)
    assert "copy gives the same answer as BF16 up to token 2 in the median; 10 of 25 answers never part." in summary(
        comparison
    )
    assert "to the end" in as_text(comparison)
    assert "same for, median tokens" in as_text(comparison)
    assert "copy,,,float32,agreement_median,2.0" in as_csv(comparison)
    assert ", same answer for 2 tokens" in verdict_line(comparison, copy)
    header, *_, row = [line for line in card(comparison).splitlines() if line.startswith("| ")]
    assert (header.split(" | ")[-1], row.split(" | ")[-1]) == ("same answer for (tokens) |", "2 |")
    write_report(comparison, path := tmp_path / "report.html")
    html = path.read_text()
    assert "Answers that part first" in html
    assert "<td>“the”</td><td>“the”</td><td>“&lt;a&gt;”</td>" in html
    [plot] = [plot for plot in plots(comparison) if plot.name == "agreement"]
    svg = as_svg(plot.draw(LIGHT), text_as_paths=False)
    assert "copy: 80.0% of answers are the same for 2 tokens" in svg
    assert "the original itself (prefill)" in svg


def test_a_run_alone_is_next_to_a_reference_without_figures(comparison):
    alone = compare([comparison.runs[1].run], num_resamples=100)
    header, reference, copy = as_text(alone).split("same for, median tokens")[1].splitlines()[:3]
    assert header.split()[:3] == ["same", "for,", "25"]
    assert (reference.split()[1], copy.split()[1]) == ("-", "2")
    assert "sampled: same for" not in as_text(alone)


def test_a_domains_answers_are_those_with_its_label(comparison):
    [of_b] = [row for group, row in comparison.groups if group.name == "b" and row.run.label == "copy"]
    lengths, sizes = np.array(LENGTHS * 5)[::2], np.array(SIZES * 5)[::2]
    assert of_b.agreement_share.value == np.mean(lengths == sizes)


def test_files_whose_answers_do_not_fit_are_refused(tmp_path):
    with pytest.raises(RunError, match="other than 6 agreement_lengths"):
        run_of(tmp_path / "run.json", LENGTHS, floor=[1, 2])
    path = run_of(tmp_path / "run.json", LENGTHS).path
    path.write_text(path.read_text().replace('"num_answers": 6', '"num_answers": 3'))
    with pytest.raises(RunError, match="of the 3 answers"):
        load_run(path)
