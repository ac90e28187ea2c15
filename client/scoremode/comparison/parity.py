"""Shows a run of `ppl-client parity` in the report: differences by position, and a histogram."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from scoremode.comparison.plot_style import Theme, draw_curve, legend, plain_log_axis
from scoremode.comparison.plots import Plot
from scoremode.kld import Floats
from scoremode.runs import AGAIN, HISTOGRAM_EDGES, ParityRun


def parity_plots(run: ParityRun) -> list[Plot]:
    off, colors, parts = "absolute difference (nats)", range(len(run.figures)), run.parts["position"]
    firsts = np.array([name.split()[0].replace(",", "") for name in parts], float)
    means = {pair: np.array([part[pair] for part in parts.values()]) for pair in run.figures}
    # A log axis has no 0: half a token is the base line.
    shares = {pair: np.maximum(counts, 0.5) / sum(counts) for pair, counts in run.histograms.items()}
    middles = np.sqrt(HISTOGRAM_EDGES[:-1] * HISTOGRAM_EDGES[1:])
    return [
        Plot(
            "parity-by-position",
            "Mean absolute difference of logprobs by position",
            "Mean absolute difference of logprobs by position. Dotted: the server against itself.",
            partial(_draw, firsts, means, "tokens before", f"mean {off}"),
            colors,
        ),
        Plot(
            "parity-histogram",
            "Histogram of absolute differences of logprobs",
            "Share of tokens by absolute difference. Dotted: the server against itself.",
            partial(_draw, middles, shares, off, "share of tokens"),
            colors,
        ),
    ]


def _draw(
    x: Floats, curves: Mapping[str, Floats], x_name: str, y_name: str, drawing: Drawing, axes: Axes, theme: Theme
) -> None:
    axes.set(xlabel=x_name, ylabel=y_name)
    for index, (pair, y) in enumerate(curves.items()):
        if (y > 0).any():
            number = None if AGAIN in pair else index
            draw_curve(axes, theme, number, x, np.where(y > 0, y, np.nan), pair, pair, "{:.2g}: {:.2g}")
    plain_log_axis(axes, "x")
    plain_log_axis(axes, "y")
    legend(drawing, axes, theme)
