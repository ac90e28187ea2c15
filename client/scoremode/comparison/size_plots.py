"""Perplexity and mean KL divergence against what a model takes: which of the runs is worth its size."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from scoremode.comparison.plot_style import (
    HEIGHT,
    Theme,
    add_tip,
    legend,
    line_box,
    marker,
    new_axes,
    plain_log_axis,
    put_label,
)
from scoremode.comparison.sizes import MIN_FRONT, Point, pareto_front

_LOG_RATIO = 8.0
"""Values that lie farther apart than this share a log axis."""


def draw(all_points: Sequence[Point], size: str | None, value: str, floor: float | None, theme: Theme) -> Drawing:
    """A value against size, or by run where the size is not known; `floor` is the noise floor, if there is one."""
    if size is None:
        return _draw_by_run(all_points, value, floor, theme)
    drawing, axes = new_axes(theme)
    _set_scale(axes, all_points, floor, "y")
    _set_size_scale(axes, [point.size for point in all_points])
    axes.set_xlabel(size)
    axes.set_ylabel(value)
    axes.margins(y=0.12)
    for point in all_points:
        _draw_point(axes, point, point.size, theme, size)
    if floor:
        axes.axhline(floor, color=theme.quiet, linewidth=1, linestyle=(0, (1, 2)), label="noise floor")
    if all(point.low > 0 for point in all_points) and axes.get_ylim()[0] < 0:
        axes.set_ylim(bottom=0)
    # From edge to edge, so that a front of one run is a line too.
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    line = _draw_front(axes, all_points, theme) if len(all_points) >= MIN_FRONT else []
    legend(drawing, axes, theme)
    # Labels keep clear of points in pixels, so the layout has to be final.
    drawing.draw_without_rendering()
    taken = list(_taken(axes, all_points, line, floor))
    for point in all_points:
        put_label(axes, theme, taken, (point.size, point.value), point.label, theme.run(point.index))
    return drawing


def _draw_front(axes: Axes, all_points: Sequence[Point], theme: Theme) -> list[tuple[float, float]]:
    """Returns the corners of the line."""
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
    return line


def _taken(
    axes: Axes, all_points: Sequence[Point], front: Sequence[tuple[float, float]], floor: float | None
) -> Iterator[Bbox]:
    """Where labels would cover something, in pixels: points with their intervals, the front, the noise floor."""
    for point in all_points:
        at = point.size
        yield line_box(axes, (at, point.low), (at, point.high), half_width=6)
    for one, other in pairwise(front):
        corner = (other[0], one[1])
        yield line_box(axes, one, corner)
        yield line_box(axes, corner, other)
    if floor:
        left, right = axes.get_xlim()
        yield line_box(axes, (left, floor), (right, floor))


def _draw_by_run(all_points: Sequence[Point], value: str, floor: float | None, theme: Theme) -> Drawing:
    drawing, axes = new_axes(theme, height=max(HEIGHT / 2, 1.4 + 0.4 * len(all_points)))
    _set_scale(axes, all_points, floor, "x")
    for row, point in enumerate(all_points):
        _draw_point(axes, point, row, theme, None)
    axes.set_yticks(range(len(all_points)), [point.label for point in all_points])
    axes.set_ylim(len(all_points) - 0.5, -0.5)
    axes.set_xlabel(value)
    if floor:
        axes.axvline(floor, color=theme.quiet, linewidth=1, linestyle=(0, (1, 2)), label="noise floor")
    legend(drawing, axes, theme)
    return drawing


def _set_scale(axes: Axes, all_points: Sequence[Point], floor: float | None, which: str) -> None:
    """A log axis where values lie far apart. It needs its limits before its ticks."""
    values = [point.value for point in all_points] + ([floor] if floor else [])
    if min(values) <= 0 or max(values) / min(values) <= _LOG_RATIO:
        return
    ends = [*values, *(end for point in all_points for end in (point.low, point.high) if end > 0)]
    (axes.set_xlim if which == "x" else axes.set_ylim)(max(min(ends), min(values) / 10) / 2, max(ends) * 2)
    plain_log_axis(axes, which)


def _set_size_scale(axes: Axes, sizes: Sequence[float]) -> None:
    """Sizes that lie far apart, as those of 4 and of 16 bits, on a log axis with ticks at powers of 2 and between."""
    low, high = min(sizes), max(sizes)
    if low <= 0 or high / low <= 2:
        axes.margins(x=0.15)
        if low == high:
            axes.set_xlim(0, 1.3 * high)
        return
    axes.set_xscale("log")
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5), numticks=100))
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_point(axes: Axes, point: Point, at: float, theme: Theme, size: str | None) -> None:
    """The value with its interval, at a place on the other axis: that of the size, or of rows where none is known."""
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
