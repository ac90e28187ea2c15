"""Computes for how many tokens runs give the same answers as the original, their reference's recorded model.

An answer of the original parts at its first token that is not the run's top token. It also parts where only one of both
models stops, which may be after the answer's last token. An answer that never parts is censored: a difference could
still come after its end. So quantiles are those of the Kaplan-Meier estimate. Answers are independent, so intervals are
exact if no answer is censored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.bootstrap import MIN_UNITS, ROUNDING, exact_interval, unit_counts
from scoremode.comparison.figures import Figure
from scoremode.comparison.run_file import RunFile
from scoremode.kld import Floats, agreement_lengths, follows_stop, num_ties

AgreementFigures = dict[str, Any]
"""Values of fields of `RunFigures`, by name."""
_QUANTILES = {"agreement_p10": 0.1, "agreement_p25": 0.25, "agreement_median": 0.5, "agreement_p75": 0.75}


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """The agreement of a run with every answer that is not empty: arrays of shape [answers]."""

    lengths: NDArray[np.int64]
    """Tokens before the first difference; all of the answer's tokens, as in `sizes`, if there is none."""
    sizes: NDArray[np.int64]
    parts: NDArray[np.bool_]
    """Whether the answer parts, which may be after its last token."""

    @property
    def _last(self) -> NDArray[np.int64]:
        """The number of the token that differs, from 1; that of the last token if the answer never parts."""
        return self.lengths + self.parts

    def survival(self) -> tuple[Floats, Floats]:
        """Numbers of tokens from 0 on, and for each the estimated share of answers that agree for at least as many."""
        # Imported here because this takes a second, and most comparisons have no answers.
        from scipy.stats import CensoredData, ecdf

        estimate = ecdf(CensoredData.right_censored(self._last, ~self.parts)).sf
        return np.append(0, estimate.quantiles), np.append(1.0, estimate.probabilities)

    def quantile(self, fraction: float) -> float:
        """The agreement in tokens that at least `fraction` of answers do not exceed; infinite if fewer ever part."""
        tokens, shares = self.survival()
        return _quantile(tokens, shares, fraction)

    def survival_intervals(self) -> tuple[Floats, Floats, Floats]:
        """The numbers of tokens in `survival`, and the low and high ends of the 95 % intervals of its shares.

        Intervals are Clopper and Pearson's, for the number of answers that would give a share its Greenwood
        variance: the number of all answers if none is censored.
        """
        tokens, shares = self.survival()
        ordered = np.sort(self._last)
        num_left = len(ordered) - np.searchsorted(ordered, tokens)
        num_parting = np.array([((self._last == token) & self.parts).sum() for token in tokens])
        # If all remaining answers part, the share falls to 0, and its variance is not defined.
        with np.errstate(divide="ignore", invalid="ignore"):
            relative_variance = np.cumsum(num_parting / (num_left * (num_left - num_parting)))
            sizes = (1 - shares) / (shares * relative_variance)
        sizes = np.where((shares > 0) & (shares < 1), sizes, num_left)
        ends = [exact_interval(share, size) for share, size in zip(shares.tolist(), sizes.tolist(), strict=True)]
        low, high = np.minimum.accumulate(ends).T
        # Replace the first number, 0, because `_quantile` subtracts 1.
        return np.maximum(tokens, 1), low, high

    def quantile_figure(self, fraction: float) -> Figure:
        """A quantile with Brookmeyer and Crowley's interval: the same quantile of each end of `survival_intervals`. If
        all answers part, the interval's ends are order statistics. Equal ends are left out."""
        tokens, *shares = self.survival_intervals()
        low, high = (_quantile(tokens, ends, fraction) for ends in shares)
        ends = (low, high) if low < high else (None, None)
        return Figure(self.quantile(fraction), None, *ends)


def _quantile(tokens: Floats, shares: Floats, fraction: float) -> float:
    """One less than the first of `tokens` whose share is at most 1 - `fraction`; infinite if there is none."""
    # Allow for rounding: the product for a share of one half may be a little larger.
    first = int((shares > 1 - fraction + 1e-9).sum())
    return float(tokens[first]) - 1 if first < len(tokens) else math.inf


def has_answers(run: RunFile, *, are_greedy: bool) -> bool:
    """Whether a run was compared with a reference of answers: greedy ones if `are_greedy`, else sampled ones. False for
    a run that stands for the reference itself."""
    answers = None if run.reference is None or run.is_reference else run.reference.answers
    return answers is not None and answers.are_greedy == are_greedy


def agreement_of(run: RunFile, members: NDArray[np.bool_] | None = None) -> Agreement:
    """The agreement of a run with the recorded answers, or with their tokens in a group, the mask `members` [n]."""
    assert run.top_token_ids is not None
    members = np.ones(run.num_scored, bool) if members is None else members
    is_same, sizes = (run.top_token_ids == run.token_ids) & ~has_stopped(run), _sizes(run, members)
    lengths = agreement_lengths(is_same[members], sizes)
    parts = (lengths < sizes) | (_continues(run) & members[np.cumsum(run.window_sizes) - 1])
    return Agreement(lengths[sizes > 0], sizes[sizes > 0], parts[sizes > 0])


def has_stopped(run: RunFile) -> NDArray[np.bool_]:
    """[n], whether the token before a target ends the answer for the run, but not for the original."""
    assert run.reference is not None
    return follows_stop(run.token_ids, run.window_sizes, run.reference.other_stops(run.server)[1])


def _continues(run: RunFile) -> NDArray[np.bool_]:
    """[windows], whether an answer's last token ends it for the original, but not for the run. At the limit on tokens
    both models end."""
    assert run.reference is not None
    assert run.reference.answers is not None
    last = run.token_ids[np.cumsum(run.window_sizes) - 1]
    is_shorter = run.window_sizes < run.reference.answers.max_new_tokens
    return is_shorter & np.isin(last, run.reference.other_stops(run.server)[0])


def floor_of(run: RunFile, runs: Sequence[RunFile]) -> Agreement | None:
    """The agreement of the reference's own model with its answers, in the lane of `run` (prefill, decode or verify).
    It comes from the first of `runs` whose noise floor has it; None without such a run."""
    for other in runs:
        is_alike = other.reference_identity == run.reference_identity and other.lane == run.lane
        floor = None if other.reference is None else other.reference.noise_floor_of(run.lane)
        if is_alike and floor is not None and floor.agreement_lengths is not None:
            assert other.window_documents is not None
            lengths = np.array(floor.agreement_lengths)[other.window_documents]
            return Agreement(lengths, run.window_sizes.astype(np.int64), lengths < run.window_sizes)
    return None


def answer_counts(runs: Sequence[RunFile], num_resamples: int, seed: int) -> Floats | None:
    """How often each resample draws each answer, [resamples, answers]; None without enough sampled answers."""
    num_answers = max((run.num_windows for run in runs if has_answers(run, are_greedy=False)), default=0)
    if num_answers < MIN_UNITS:
        return None
    return np.stack([*unit_counts(num_answers, 1, num_resamples, seed)])


def agreement_figures(
    run: RunFile, counts: Floats | None, members: NDArray[np.bool_] | None = None
) -> AgreementFigures:
    """The figures of a run, or of a group of its targets, the mask `members` [n]; empty unless the run's reference has
    answers. `counts` is from `answer_counts`."""
    present = _sizes(run, members) > 0
    answer_draws = None if counts is None or present.sum() < MIN_UNITS else counts[:, present]
    if has_answers(run, are_greedy=True):
        agreement = agreement_of(run, members)
        figures = _figures(agreement)
        if run.top_ties is not None and members is None:
            figures["agreement_ties"] = num_ties(run.top_ties > 0, agreement.lengths, run.window_sizes)
        return figures
    if has_answers(run, are_greedy=False):
        return {"expected_agreement": _mean(expected_lengths(run, members)[present], answer_draws)}
    return {}


def floor_figures(run: RunFile, runs: Sequence[RunFile]) -> AgreementFigures:
    """Median agreement and share of same answers for the reference's own model; empty if they are not known."""
    floor = floor_of(run, runs) if has_answers(run, are_greedy=True) else None
    if floor is None:
        return {}
    return {
        "agreement_floor": Figure(floor.quantile(0.5), None, None, None),
        "agreement_floor_share": _share(floor),
    }


def expected_lengths(run: RunFile, members: NDArray[np.bool_] | None = None) -> Floats:
    """[windows], for each sampled answer the sum over its tokens of the product of min(1, q/p) up to the token, where q
    and p are the run's and the original's probabilities. The mean over answers is the expected number of tokens that
    the best coupling of both samplers has in common."""
    assert run.reference_nlls is not None
    logs = np.where(has_stopped(run), -np.inf, np.minimum(run.reference_nlls - run.nlls, 0.0))
    parts = np.split(logs if members is None else logs[members], np.cumsum(_sizes(run, members))[:-1])
    return np.array([np.exp(np.cumsum(part)).sum() for part in parts])


def _figures(agreement: Agreement) -> AgreementFigures:
    quantiles = {name: agreement.quantile_figure(fraction) for name, fraction in _QUANTILES.items()}
    return {"agreement_share": _share(agreement), **quantiles}


def _share(agreement: Agreement) -> Figure:
    """The share of answers that are the same to their end."""
    share = float((~agreement.parts).mean())
    return Figure(share, None, *exact_interval(share, len(agreement.parts)))


def _mean(values: Floats, counts: Floats | None) -> Figure:
    """The mean over answers, with percentiles of the resampled means as its interval, or none if all are equal."""
    low, high = (math.nan, math.nan) if counts is None else _percentiles(counts @ values / counts.sum(axis=1))
    ends = (low, high) if high - low > ROUNDING else (None, None)
    return Figure(float(values.mean()), None, *ends)


def _percentiles(resampled: Floats) -> tuple[float, float]:
    """The ends of the 95 % interval: quantiles of resampled means, without NaN."""
    low, high = np.quantile(resampled[~np.isnan(resampled)], (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def _sizes(run: RunFile, members: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    """[windows], how many targets of each window are in a group, the mask `members` [n]; all without a group."""
    if members is None:
        return run.window_sizes.astype(np.int64)
    ends = np.cumsum(run.window_sizes)
    return np.diff(np.append(0, np.cumsum(members))[ends], prepend=0).astype(np.int64)
