"""Computes statistics of KL divergence from its values at every position: llama.cpp's, and more.

docs/kld.md has the formulas. `p` is the reference's distribution, `q` the compared model's. Sums are in float64. An
infinite or undefined figure is None, because JSON has neither. The standard error of a figure that compares both models
comes from their differences at each position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from scoremode.metrics import exp, finite_or_none
from scoremode.wire import ConfidenceBucket, DeltaPFigures, DivergentPosition, KldFigures, KldStatistics

Floats = NDArray[np.float64]

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Edges of the buckets for the probability that `p` gives its top token, as in ExLlamaV3."""
NUM_MOST_DIVERGENT = 20
NEGLIGIBLE_KLD = 1e-9
"""A smaller mean KL divergence, in nats, is only the rounding of float32 logits, and is shown as 0."""
_QUANTILES = {
    "median": 0.5,
    "p999": 0.999,
    "p99": 0.99,
    "p95": 0.95,
    "p90": 0.9,
    "p10": 0.1,
    "p5": 0.05,
    "p1": 0.01,
    "p01": 0.001,
}


@dataclass(frozen=True, slots=True, eq=False)
class KldPositions:
    """A comparison's values at n positions, in the order of windows: arrays of shape [n].

    `KldWindow` in `wire.references` explains the fields. `POSITION_DTYPES` has their types on the wire.
    """

    token_ids: NDArray[Any]
    kld: NDArray[Any]
    reverse_kld: NDArray[Any]
    acceptance: NDArray[Any]
    logprobs: NDArray[Any]
    reference_logprobs: NDArray[Any]
    ranks: NDArray[Any]
    reference_ranks: NDArray[Any]
    top_token_ids: NDArray[Any]
    reference_top_token_ids: NDArray[Any]
    reference_confidence: NDArray[Any]

    def __post_init__(self) -> None:
        shapes = {name: getattr(self, name).shape for name in POSITION_DTYPES}
        if set(shapes.values()) != {(len(self.kld),)}:
            raise ValueError(f"arrays of different shapes: {shapes}")

    def __len__(self) -> int:
        return len(self.kld)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The positions of several windows, one after another."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in POSITION_DTYPES})


_INTEGERS = ("token_ids", "ranks", "reference_ranks", "top_token_ids", "reference_top_token_ids")
POSITION_DTYPES = {field.name: "<i4" if field.name in _INTEGERS else "<f4" for field in fields(KldPositions)}
"""Types of the fields of `KldPositions` on the wire and on disk: little-endian int32 or float32."""


# Infinities are expected. Figures that they make undefined become None.
@np.errstate(invalid="ignore", over="ignore")
def statistics(positions: KldPositions, window_sizes: Sequence[int], first_window: int = 0) -> KldStatistics:
    """Compute all statistics of consecutive windows of a reference.

    Args:
        positions: The values at all positions, in the order of windows.
        window_sizes: The number of positions in each window.
        first_window: The first window's index in the reference.

    Raises:
        ValueError: `positions` is empty or has a NaN, or `window_sizes` do not add up to its length.
    """
    if not len(positions) or sum(window_sizes) != len(positions):
        raise ValueError(f"{len(positions)} positions in windows of {sum(window_sizes)}")
    sizes = np.asarray(window_sizes)
    kld, reverse_kld = _floats(positions.kld), _floats(positions.reverse_kld)
    nll_q, nll_base = -_floats(positions.logprobs), -_floats(positions.reference_logprobs)
    acceptance = _floats(positions.acceptance)
    delta_p = np.exp(-nll_q) - np.exp(-nll_base)
    same_top = _floats(positions.top_token_ids == positions.reference_top_token_ids)

    mean_q, mean_base = float(nll_q.mean()), float(nll_base.mean())
    ppl_q, ppl_base = exp(mean_q), exp(mean_base)
    stderr_q, stderr_base = standard_error(nll_q), standard_error(nll_base)
    ln_ratio = float((nll_q - nll_base).mean())
    ratio = exp(ln_ratio)
    ln_ratio_stderr = standard_error(nll_q - nll_base)
    figures: KldStatistics = {
        "num_scored": len(kld),
        "num_windows": len(sizes),
        "nll_q": mean_q,
        "nll_q_stderr": stderr_q,
        "nll_base": mean_base,
        "nll_base_stderr": stderr_base,
        "ppl_q": ppl_q,
        "ppl_q_stderr": ppl_q * stderr_q,
        "ppl_base": ppl_base,
        "ppl_base_stderr": ppl_base * stderr_base,
        "ln_ppl_correlation": _correlation(nll_q, nll_base),
        "ln_ppl_ratio": ln_ratio,
        "ln_ppl_ratio_stderr": ln_ratio_stderr,
        "ln_ppl_ratio_stderr_clustered": clustered_standard_error(nll_q - nll_base, sizes),
        "ppl_ratio": ratio,
        "ppl_ratio_stderr": ratio * ln_ratio_stderr,
        "ppl_difference": ppl_q - ppl_base,
        "ppl_difference_stderr": standard_error(ppl_q * nll_q - ppl_base * nll_base),
        "kld": _kld_figures(kld, sizes),
        "num_infinite_kld": int(np.isinf(kld).sum()),
        "top_1_percent_share": _tail_share(kld),
        "reverse_kld_mean": reverse_kld.mean(),
        "num_infinite_reverse_kld": int(np.isinf(reverse_kld).sum()),
        "acceptance_mean": acceptance.mean(),
        "delta_p": _delta_p_figures(delta_p, sizes),
        "same_top_p": float(same_top.mean()),
        "same_top_p_stderr": standard_error(same_top),
        "same_top_p_stderr_clustered": clustered_standard_error(same_top, sizes),
        "confidence_buckets": _confidence_buckets(_floats(positions.reference_confidence), kld, same_top),
        "most_divergent": _most_divergent(kld, sizes, first_window),
    }
    return cast(KldStatistics, finite_or_none(figures))


def agreement_lengths(is_same: NDArray[np.bool_], window_sizes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Count the targets of each window before the first that is not the same; all of its targets if there is none.

    `is_same` [n] says whether a target equals the compared model's own choice, in the order of windows. `window_sizes`
    has the number of targets in each window, perhaps 0.
    """
    ends = np.cumsum(window_sizes, dtype=np.int64)
    differing = np.flatnonzero(~is_same)
    starts = ends - window_sizes
    following = np.append(differing, len(is_same))[np.searchsorted(differing, starts)]
    lengths: NDArray[np.int64] = np.minimum(following, ends) - starts
    return lengths


def follows_stop(
    token_ids: NDArray[Any], window_sizes: NDArray[np.integer[Any]], stops: Sequence[int]
) -> NDArray[np.bool_]:
    """For each of [n] targets, whether the target directly before it in the same window is a stop token."""
    follows = np.roll(np.isin(token_ids, stops), 1)
    follows[(np.cumsum(window_sizes) - window_sizes)[window_sizes > 0]] = False
    return follows


def num_ties(ties: NDArray[np.bool_], lengths: NDArray[np.int64], window_sizes: NDArray[np.integer[Any]]) -> int:
    """Count ties, in each window up to and including the first target that is not the same, and return their sum.

    `ties` [n] says whether a target has the top token's logit, but is another token; `lengths` [windows] is from
    `agreement_lengths`.
    """
    starts = np.cumsum(window_sizes) - window_sizes
    places = np.arange(len(ties)) - np.repeat(starts, window_sizes)
    return int((ties & (places <= np.repeat(lengths, window_sizes))).sum())


def of_answers(values: NDArray[np.int64], documents: Sequence[int], num_answers: int) -> list[int]:
    """Spread values of windows over all answers, with 0 for answers without a window. `documents` has the index of each
    window's answer."""
    answers = np.zeros(num_answers, np.int64)
    answers[list(documents)] = values
    return [int(value) for value in answers]


def over_noise_floor(mean: float | None, floor: float | None) -> float | None:
    """A mean KL divergence as a multiple of the noise floor, which is the recorded model's divergence from itself. None
    if either is None, or the floor is too small for a meaningful multiple."""
    return mean / floor if mean is not None and floor is not None and floor >= NEGLIGIBLE_KLD else None


def times_the_floor(multiple: float) -> str:
    """A multiple of the noise floor, as a phrase."""
    return f"{multiple:,.{0 if multiple > 1000 else 1}f} times"


def standard_error(values: Floats) -> float:
    """The standard error of the mean if values are independent; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return math.sqrt(np.square(values - values.mean()).mean() / (len(values) - 1))


def clustered_standard_error(values: Floats, window_sizes: NDArray[np.integer[Any]]) -> float:
    """The standard error of the mean if windows are independent; NaN for fewer than two windows.

    `values` are [n], in the order of windows, and `window_sizes` says how many each has; empty windows do not count.
    """
    sizes = window_sizes[window_sizes > 0]
    return error_of_sums(np.add.reduceat(values, np.cumsum(sizes) - sizes), sizes)


def error_of_sums(sums: NDArray[Any], sizes: NDArray[np.integer[Any]]) -> float:
    """The standard error of a mean over targets if windows are independent, given each window's sum and its number of
    targets, [windows] both; NaN for fewer than two windows."""
    if len(sizes) < 2:
        return math.nan
    residuals = sums - sums.sum() / sizes.sum() * sizes
    return math.sqrt(np.square(residuals).sum() * len(sizes) / (len(sizes) - 1)) / int(sizes.sum())


def bucket_of(confidence: Floats) -> NDArray[np.intp]:
    """The index of each probability's bucket between `CONFIDENCE_EDGES`.

    A probability that was rounded to more than 1 is in the last bucket.
    """
    return np.digitize(confidence, CONFIDENCE_EDGES[1:-1])


def quantile(ordered: Floats, fraction: float) -> float:
    """Compute a quantile of `ordered`, [n] ascending values, by linear interpolation. Values may be infinite."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    share = position - below
    lower, upper = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    # Do not interpolate with a share of 0, or between two infinities: the result would be NaN.
    return lower if not share or lower == upper else lower + share * (upper - lower)


def _floats(values: NDArray[Any]) -> Floats:
    floats = values.astype(np.float64)
    if np.isnan(floats).any():
        raise ValueError("a value is NaN")
    return floats


def _correlation(first: Floats, second: Floats) -> float:
    first, second = first - first.mean(), second - second.mean()
    norm = math.sqrt((first @ first) * (second @ second))
    return float(first @ second) / norm if norm else math.nan


def _kld_figures(values: Floats, window_sizes: NDArray[Any]) -> KldFigures:
    ordered = np.sort(values)
    figures = {
        "mean": values.mean(),
        "stderr": standard_error(values),
        "stderr_clustered": clustered_standard_error(values, window_sizes),
        "max": ordered[-1],
        "min": ordered[0],
        **{name: quantile(ordered, fraction) for name, fraction in _QUANTILES.items()},
    }
    return cast(KldFigures, {name: figures[name] for name in KldFigures.__annotations__})


def _delta_p_figures(values: Floats, window_sizes: NDArray[Any]) -> DeltaPFigures:
    ordered, squares = np.sort(values), np.square(values)
    rms = math.sqrt(squares.mean())
    return {
        **_kld_figures(values, window_sizes),
        "p75": quantile(ordered, 0.75),
        "p25": quantile(ordered, 0.25),
        "rms": rms,
        "rms_stderr": 0.5 / rms * standard_error(squares) if rms else None,
    }


def _tail_share(kld: Floats) -> float:
    """The share of the sum that comes from the 1 % of positions with the largest values; NaN if the sum is 0. The
    number of these positions is rounded up."""
    num_tail = -(-len(kld) // 100)
    total = float(kld.sum())
    return float(np.sort(kld)[-num_tail:].sum()) / total if total else math.nan


def _confidence_buckets(confidence: Floats, kld: Floats, same_top: Floats) -> list[ConfidenceBucket]:
    positions = bucket_of(confidence) == np.arange(len(CONFIDENCE_EDGES) - 1)[:, np.newaxis]
    return [
        {
            "lower": lower,
            "upper": upper,
            "count": int(inside.sum()),
            "share": float(inside.mean()),
            "mean_kld": kld[inside].mean() if inside.any() else None,
            "same_top_p": same_top[inside].mean() if inside.any() else None,
        }
        for (lower, upper), inside in zip(pairwise(CONFIDENCE_EDGES), positions, strict=True)
    ]


def _most_divergent(kld: Floats, window_sizes: NDArray[Any], first_window: int) -> list[DivergentPosition]:
    window_of = np.repeat(np.arange(len(window_sizes)) + first_window, window_sizes)
    largest = np.argsort(-kld, kind="stable")[: min(NUM_MOST_DIVERGENT, int((kld > 0).sum()))]
    return [{"index": int(at), "window": int(window_of[at]), "kld": kld[at]} for at in largest]
