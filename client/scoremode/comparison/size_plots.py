"""Plots perplexity and mean KL divergence against a model's size: which runs are worth their size."""

import logging
from collections.abc import Sequence

import numpy as np
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullLocator

from scoremode.comparison.plot_style import HEIGHT, Theme, add_tip, draw_floor, legend, marker, plain_log_axis
from scoremode.comparison.sizes import MIN_FRONT, Point, pareto_front

# It warns at each of its steps about a label that is wider than the plot.
logging.getLogger("adjustText").setLevel(logging.ERROR)


def draw(
    all_points: Sequence[Point],
    size: str | None,
    value: str,
    floor: float | None,
    drawing: Drawing,
    axes: Axes,
    theme: Theme,
) -> None:
    """Plot a value against size, or by run if `size`, the axis label, is None. `floor` is the noise floor, if any."""
    if size is None:
        _draw_by_run(all_points, value, floor, drawing, axes, theme)
        return
    _set_scale(axes, all_points, floor, "y")
    set_size_scale(axes, [point.size for point in all_points])
    axes.set(xlabel=size, ylabel=value)
    axes.margins(y=0.12)
    for point in all_points:
        _draw_point(axes, point, point.size, theme, size)
    if all(point.low > 0 for point in all_points) and axes.get_ylim()[0] < 0:
        axes.set_ylim(bottom=0)
    # Fix the limits first: the floor and the front are drawn to the edges, so that a front of one run is a line too.
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    draw_floor(axes, theme, floor, "y")
    if len(all_points) >= MIN_FRONT:
        _draw_front(axes, all_points, theme)
    legend(drawing, axes, theme)
    label_points(drawing, axes, all_points, theme)


def _draw_front(axes: Axes, all_points: Sequence[Point], theme: Theme) -> None:
    front = pareto_front(all_points)
    line = [
        (front[0].size, axes.get_ylim()[1]),
        *((point.size, point.value) for point in front),
        (axes.get_xlim()[1], front[-1].value),
    ]
    axes.plot(
        *zip(*line, strict=True),
        drawstyle="steps-post",
        color=theme.quiet,
        linewidth=1.4,
        linestyle=(0, (4, 3)),
        zorder=1,
        label="Pareto front",
    )


def label_points(drawing: Drawing, axes: Axes, all_points: Sequence[Point], theme: Theme) -> None:
    """Put labels where they cover neither each other nor points, intervals and lines. Draw lines to distant points."""
    labels = [
        axes.text(point.size, point.value, point.label, color=theme.run(point.index), fontsize=10)
        for point in all_points
    ]
    # Labels avoid the pixels of other shapes, which are known once the layout is final.
    drawing.draw_without_rendering()
    paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    paths += [bar.get_transform().transform_path(path) for bar in axes.collections for path in bar.get_paths()]
    pixels = np.concatenate([path.interpolated(20).vertices for path in paths])
    adjust_text(
        labels,
        *axes.transData.inverted().transform(pixels).T,
        target_x=[point.size for point in all_points],
        target_y=[point.value for point in all_points],
        ax=axes,
        # Without a limit on iterations, adjust_text stops after a second, so results may differ between calls.
        iter_lim=500,
        force_static=(1.5, 1.5),
        max_move=(30, 30),
        arrowprops={"arrowstyle": "-", "color": theme.quiet, "linewidth": 0.7},
    )


def _draw_by_run(
    all_points: Sequence[Point], value: str, floor: float | None, drawing: Drawing, axes: Axes, theme: Theme
) -> None:
    drawing.set_figheight(max(HEIGHT / 2, 1.4 + 0.4 * len(all_points)))
    _set_scale(axes, all_points, floor, "x")
    for row, point in enumerate(all_points):
        _draw_point(axes, point, row, theme, None)
    axes.set_yticks(range(len(all_points)), [point.label for point in all_points])
    axes.set_ylim(len(all_points) - 0.5, -0.5)
    axes.set_xlabel(value)
    draw_floor(axes, theme, floor, "x")
    legend(drawing, axes, theme)


def _set_scale(axes: Axes, all_points: Sequence[Point], floor: float | None, which: str) -> None:
    """Use a log axis if the largest value is over eight times the smallest. Limits must be set before ticks."""
    values = [point.value for point in all_points]
    # Leave out a floor far below all runs: an axis with both would show neither. Its line is then at the axis's end.
    if floor and 1000 * floor >= min(values):
        values.append(floor)
    if min(values) <= 0 or max(values) / min(values) <= 8:
        return
    ends = [*values, *(end for point in all_points for end in (point.low, point.high) if end > 0)]
    (axes.set_xlim if which == "x" else axes.set_ylim)(max(min(ends), min(values) / 10) / 2, max(ends) * 2)
    plain_log_axis(axes, which)


def set_size_scale(axes: Axes, sizes: Sequence[float]) -> None:
    """Use a log axis with ticks at round numbers for sizes that lie far apart, such as those of 4 and 16 bits."""
    low, high = min(sizes), max(sizes)
    if low <= 0 or high / low <= 2:
        axes.margins(x=0.15)
        if low == high:
            axes.set_xlim(0, 1.3 * high)
        return
    axes.set_xscale("log")
    axes.set_xlim(low / 1.25, high * 1.25)
    subs = (1, 1.5, 2, 3, 4, 6, 8) if high / low < 10 else (1, 2, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=100))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_point(axes: Axes, point: Point, at: float, theme: Theme, size: str | None) -> None:
    """Draw a value with its interval. `at` is its place on the axis without values: a size, or a row if `size` is
    None."""
    interval = [[point.value - point.low], [point.high - point.value]]
    vertical = size is not None
    container = axes.errorbar(
        [at if vertical else point.value],
        [point.value if vertical else at],
        xerr=None if vertical else interval,
        yerr=interval if vertical else None,
        color=theme.run(point.index),
        marker=marker(point.index),
        markersize=7,
        capsize=3,
        linestyle="none",
    )
    ends = f" [{point.low:.4g}, {point.high:.4g}]" if point.low < point.high else ""
    at_size = f"; {size}: {point.size:.3g}" if size else ""
    add_tip(container.get_children(), f"{point.label}: {point.value:.4g}{ends}{at_size}")
