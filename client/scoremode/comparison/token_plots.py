"""Plots values of single tokens: their distribution, and where in the text or in the model runs differ."""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from scoremode.comparison.agreement import Agreement
from scoremode.comparison.plot_style import (
    Theme,
    add_tip,
    draw_curve,
    draw_floor,
    legend,
    legend_label,
    marker,
    plain_log_axis,
)
from scoremode.comparison.run_file import RunFile
from scoremode.kld import CONFIDENCE_EDGES, Floats, bucket_of, clustered_standard_error

Numbered = Sequence[tuple[int, RunFile]]
"""Runs with their indices in the comparison, which decide their colors."""

Curve = tuple[int | None, str, Agreement]
"""A run's index, label and agreement; a noise floor has no index."""

_CURVE_POINTS = 400
"""The number of points in a curve, as many as a plot can show: one point per token would make large files."""
_Z_95 = 1.959964


def draw_kld_distribution(runs: Numbered, floor: float | None, drawing: Drawing, axes: Axes, theme: Theme) -> None:
    """Plot the share of tokens whose KL divergence is larger than a value; both axes are logarithmic."""
    positive = [values[(values > 0) & np.isfinite(values)] for values in (_kld(run) for _, run in runs)]
    low = min((np.quantile(values, 0.002) for values in positive if len(values)), default=1e-6)
    high = max((values.max() for values in positive if len(values)), default=1.0)
    thresholds = np.geomspace(low, high * 1.3, _CURVE_POINTS)
    for index, run in runs:
        values = _kld(run)
        shares, zeros = survival(values, thresholds), float((values <= 0).mean())
        legend_text = run.label + (f" ({_percent(zeros)} exactly 0)" if zeros else "")
        form = "{1:.3%} of tokens have more than {0:.2g} nats"
        draw_curve(axes, theme, index, thresholds, shares, run.label, legend_text, form)
    axes.set_xlim(thresholds[0], thresholds[-1])
    axes.set_ylim(max(0.5 / max(len(run.nlls) for _, run in runs), 1e-7), 1.3)
    plain_log_axis(axes, "x")
    plain_log_axis(axes, "y")
    draw_floor(axes, theme, floor, "x", ", mean")
    axes.set(xlabel="KL divergence of a token (nats)", ylabel="share of tokens with more")
    legend(drawing, axes, theme)


def survival(values: Floats, thresholds: Floats) -> Floats:
    """The share of values above each threshold; NaN, which is not drawn, in place of 0."""
    above = len(values) - np.searchsorted(np.sort(values), thresholds, side="right")
    return np.where(above > 0, above / len(values), np.nan)


def draw_agreement(curves: Sequence[Curve], drawing: Drawing, axes: Axes, theme: Theme) -> None:
    """Plot for each number of tokens the share of answers that agree with the original's for at least that many."""
    for index, label, agreement in curves:
        tokens, shares = agreement.survival()
        longest = int(max(agreement.sizes.max(), tokens[-1]))
        shown = np.unique(np.linspace(0, longest, _CURVE_POINTS).astype(int))
        # The share is constant up to the next token at which an answer differs from the original's.
        shown_shares = shares[np.searchsorted(tokens, shown, side="right") - 1]
        form = "{1:.1%} of answers are the same for {0:,.0f} tokens"
        draw_curve(axes, theme, index, shown.astype(float), shown_shares, label, label, form)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="tokens of the answer", ylabel="share of answers that are the same")
    legend(drawing, axes, theme)


def draw_same_experts(runs: Numbered, drawing: Drawing, axes: Axes, theme: Theme) -> None:
    """Plot the share of tokens with the same set of experts by the layer's number in the model, of runs with routes."""
    for index, run in runs:
        layers = run.routes.layers if run.routes is not None else []
        numbers = [int((re.findall(r"\.(\d+)\b", layer.name) or [at])[0]) for at, layer in enumerate(layers)]
        for dashes, (name, field) in enumerate((("own", "same_set"), ("forced", "forced_same_set"))):
            shares = np.array([getattr(layer, field).mean for layer in layers], float)
            form = f"{{1:.2%}} of tokens have the same experts in layer {{0:g}}, {name}"
            text = f"{run.label}, {name}"
            draw_curve(axes, theme, index, np.array(numbers, float), shares, run.label, text, form, dashes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="layer", ylabel="tokens with the same experts")
    legend(drawing, axes, theme)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def draw_kld_by_confidence(runs: Numbered, drawing: Drawing, axes: Axes, theme: Theme) -> None:
    """Plot the mean KL divergence of tokens, grouped by the reference's probability of its top token."""
    edges = CONFIDENCE_EDGES
    means, errors = zip(*(confidence_means(run) for _, run in runs), strict=True)
    for place, (index, run) in enumerate(runs):
        for bucket, (mean, error) in enumerate(zip(means[place], errors[place], strict=True)):
            container = axes.errorbar(
                [bucket if len(runs) == 1 else bucket + 0.6 * (place / (len(runs) - 1) - 0.5)],
                [mean],
                yerr=[_Z_95 * error],
                color=theme.run(index),
                marker=marker(index),
                markersize=6,
                capsize=2.5,
                linestyle="none",
                label=None if bucket else legend_label(run.label),
            )
            add_tip(container.get_children(), f"{run.label}: {mean:.3g} ± {error:.2g} nats")
    if np.nanmin(means) > 0:
        # Take the lower limit from the means: an interval may reach 0, which a log axis cannot show.
        axes.set_ylim(np.nanmin(means) / 4, 1.5 * np.nanmax(np.add(means, _Z_95 * np.nan_to_num(errors))))
        plain_log_axis(axes, "y")
    counts = np.bincount(_buckets(runs[0][1]), minlength=len(edges) - 1)
    shares = [_percent(count / counts.sum()) if count else "none" for count in counts]
    names = [f"{low:g} to {high:g}\n{share}" for (low, high), share in zip(pairwise(edges), shares, strict=True)]
    axes.set_xticks(range(len(counts)), names)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="the reference's top probability, and the share of tokens", ylabel="mean KL divergence (nats)")
    legend(drawing, axes, theme)


def confidence_means(run: RunFile) -> tuple[Floats, Floats]:
    """Mean KL divergence in each bucket of the reference's confidence, [buckets], and its standard error, for which
    windows are taken as independent.

    The mean of an empty bucket is NaN, and so is the error if fewer than two windows have tokens in the bucket.
    """
    bucket, kld = _buckets(run), _kld(run)
    window = np.repeat(np.arange(len(run.window_sizes)), run.window_sizes)
    means, errors = [], []
    for index in range(len(CONFIDENCE_EDGES) - 1):
        is_inside = (bucket == index) & np.isfinite(kld)
        values = kld[is_inside]
        means.append(values.mean() if len(values) else np.nan)
        errors.append(clustered_standard_error(values, np.bincount(window[is_inside])))
    return np.array(means), np.array(errors)


def _buckets(run: RunFile) -> NDArray[np.intp]:
    assert run.reference_confidence is not None
    return bucket_of(run.reference_confidence)


def draw_running_difference(base: RunFile, runs: Numbered, drawing: Drawing, axes: Axes, theme: Theme) -> None:
    """Plot the running mean of the NLL minus the base's: for each token, over all tokens up to it. A level
    curve at its right end means that the difference lasts."""
    num_tokens = len(base.nlls)
    shown = np.unique(np.linspace(0, num_tokens - 1, _CURVE_POINTS).astype(int))
    settled = []
    for index, run in runs:
        means = running_difference(run, base)
        # The running mean varies too much in the first fiftieth of the text to set the limits of the axis.
        settled.append(means[num_tokens // 50 :])
        form = "{1:+.4f} nats over {0:,.0f} tokens"
        draw_curve(axes, theme, index, shown + 1, means[shown], run.label, run.label, form)
    axes.axhline(0, color=theme.quiet, linewidth=1)
    low, high = min(0.0, *(part.min() for part in settled)), max(0.0, *(part.max() for part in settled))
    margin = 0.08 * (high - low or 1)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, num_tokens)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens so far", ylabel="mean NLL less the base's (nats)")
    legend(drawing, axes, theme)


def running_difference(run: RunFile, base: RunFile) -> Floats:
    """[n], the mean of the first 1, 2, ... n differences of NLL."""
    return np.cumsum(run.nlls - base.nlls) / np.arange(1, len(base.nlls) + 1)


def _kld(run: RunFile) -> Floats:
    assert run.kld is not None
    return run.kld
