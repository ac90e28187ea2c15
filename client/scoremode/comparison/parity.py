"""Shows a run of `ppl-client parity` in the report: its tables, differences by position, and a histogram."""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from scoremode.comparison.plot_style import Theme, draw_curve, legend, plain_log_axis
from scoremode.comparison.plots import Plot
from scoremode.comparison.tables import Column
from scoremode.kld import Floats
from scoremode.runs import AGAIN, HISTOGRAM_EDGES, Difference, ParityRun, parity_tables

_ValuesOf = Callable[[ParityRun, Difference], tuple[Floats, Floats]]


def parity_columns(run: ParityRun) -> list[tuple[str, list[Column]]]:
    """The titles and columns of the tables."""
    return [
        (title, [Column(header, cells, place > 0) for place, (header, *cells) in enumerate(zip(*rows, strict=True))])
        for title, rows in parity_tables(run)
    ]


def parity_plots(run: ParityRun) -> list[Plot]:
    off, colors = "absolute difference (nats)", range(len(run.differences))
    return [
        Plot(
            "parity-by-position",
            "Mean absolute difference of logprobs by position",
            "Mean absolute difference of logprobs by position. Dotted: the server against itself.",
            partial(_draw, run, _by_position, "tokens before", f"mean {off}"),
            colors,
        ),
        Plot(
            "parity-histogram",
            "Histogram of absolute differences of logprobs",
            "Share of the sample's tokens by absolute difference. Dotted: the server against itself.",
            partial(_draw, run, _histogram, off, "share of tokens"),
            colors,
        ),
    ]


def _by_position(run: ParityRun, item: Difference) -> tuple[Floats, Floats]:
    values = [part.mean_absolute[item.pair] for part in run.parts if part.by == "position"]
    firsts = [part.name.split()[0].replace(",", "") for part in run.parts if part.by == "position"]
    return np.maximum(np.array(firsts, float), 1), np.array(values)


def _histogram(run: ParityRun, item: Difference) -> tuple[Floats, Floats]:
    # A log axis has no 0: half a token is the base line.
    counts = np.maximum(item.histogram, 0.5)
    return np.sqrt(HISTOGRAM_EDGES[:-1] * HISTOGRAM_EDGES[1:]), counts / sum(item.histogram)


def _draw(
    run: ParityRun, values_of: _ValuesOf, x_name: str, y_name: str, drawing: Drawing, axes: Axes, theme: Theme
) -> None:
    axes.set(xlabel=x_name, ylabel=y_name)
    for index, item in enumerate(run.differences):
        x, y = values_of(run, item)
        if (y > 0).any():
            number = None if AGAIN in item.pair else index
            draw_curve(axes, theme, number, x, np.where(y > 0, y, np.nan), item.pair, item.pair, "{:.2g}: {:.2g}")
    plain_log_axis(axes, "x")
    plain_log_axis(axes, "y")
    legend(drawing, axes, theme)
