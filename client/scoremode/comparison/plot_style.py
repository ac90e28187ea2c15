"""Styles all plots: colors for light and dark pages, axes without a frame, tips under the pointer.

Figures are made without pyplot, so that matplotlib's global state is not touched.
"""

import io
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import fill
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from scoremode.kld import Floats

WIDTH, HEIGHT = 5.6, 3.9
"""Size of a plot in inches. Two plots fill a page's width; one is readable on a phone."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_ROW, _USUAL_ROWS = 0.22, 2
"""Height of a legend's row in inches, and how many rows a plot has space for."""
_TIP = "tip:"
"""Prefix of the SVG ids that `as_svg` turns into titles."""
_NOISE = (0, (1, 2))
"""Dash pattern of a noise floor."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True, slots=True)
class Theme:
    """The colors of a plot. All colors of a theme differ, so that a page can replace each by another theme's."""

    paper: str
    ink: str
    quiet: str
    """The color of ticks, and of lines that do not belong to a run."""
    grid: str
    runs: tuple[str, ...]
    """Colors of runs: Okabe and Ito's hues, which people with any color vision can tell apart."""
    note: str = ""
    """The line below a picture that describes the measurement."""

    def run(self, index: int) -> str:
        """The color of the run at this index. Colors repeat after the last one, with other markers and dashes."""
        return self.runs[index % len(self.runs)]


LIGHT = Theme(
    "#ffffff", "#1b1f24", "#59636e", "#e3e7eb", ("#0072b2", "#c44e00", "#00805d", "#a8558a", "#6b5000", "#20252b")
)
DARK = Theme(
    "#14171c", "#e8ebef", "#a3adb8", "#2c333b", ("#56b4e9", "#f08a3c", "#2fc39a", "#e199c5", "#f0e442", "#fdfdfe")
)
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"


def _colors(theme: Theme) -> tuple[str, ...]:
    return (theme.paper, theme.ink, theme.quiet, theme.grid, *theme.runs)


_NAMES = ("paper", "ink", "quiet", "grid", *(f"run-{index}" for index in range(len(LIGHT.runs))))
_VARIABLES = {color: f"var(--plot-{name})" for color, name in zip(_colors(LIGHT), _NAMES, strict=True)}


def marker(index: int) -> str:
    """The marker of the run at this index."""
    return MARKERS[index % len(MARKERS)]


def new_axes(theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=100, layout="constrained", facecolor=theme.paper)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.paper)
    figure.supxlabel(fill(theme.note, 100), fontsize=7, color=theme.quiet)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.quiet)
    axes.tick_params(which="both", colors=theme.quiet, labelcolor=theme.ink, labelsize=10)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(theme.ink)
        axis.label.set_fontsize(11)
    return figure, axes


def plain_log_axis(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with decimal numbers as ticks (0.01). If it spans few decades, they have more ticks."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / max(low, 1e-300))
    if which == "x" and decades > 5:
        # Small numbers have many zeros and need wide ticks.
        axis.set_major_locator(LogLocator(base=100))
    axis.set_major_formatter(_tick)
    axis.set_minor_locator(LogLocator(subs=(2, 5) if decades < 2 else (3,), numticks=100))
    axis.set_minor_formatter(_tick if decades < 3.5 else NullFormatter())


def _tick(value: float, _: float = 0) -> str:
    """Format a number as people write it, never in powers of ten."""
    return np.format_float_positional(float(f"{value:.3g}"), trim="-")


def draw_floor(axes: Axes, theme: Theme, floor: float | None, which: str, more: str = "") -> None:
    """Draw the noise floor as a line across the axis `which`, at the axis's lower end if the floor lies below it."""
    if floor is None:
        return
    low = min((axes.get_xlim if which == "x" else axes.get_ylim)())
    label = f"noise floor{more}" if floor >= low else f"noise floor{more}: {_tick(floor)}, below the axis"
    line = axes.axvline if which == "x" else axes.axhline
    line(max(floor, low), color=theme.quiet, linewidth=1.5, linestyle=_NOISE, label=label, clip_on=False)


def legend_label(name: str) -> str:
    """Put a space before a name that begins with an underscore, because matplotlib hides such names."""
    return f" {name}" if name.startswith("_") else name


def legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    """Put a legend above the axes, with as many columns as its longest text allows. The figure grows with its rows."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    rows = math.ceil(len(labels) / max(1, 60 // (max(map(len, labels)) + 7)))
    columns = math.ceil(len(labels) / rows)
    figure.set_figheight(figure.get_figheight() + _ROW * max(0, rows - _USUAL_ROWS))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, labelcolor=theme.ink, fontsize=10
    )


def as_png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=200)
    return content.getvalue()


def add_tip(artists: Iterable[Artist], text: str) -> None:
    """Add a tip to artists: `as_svg` makes it a title, which browsers show under the pointer."""
    for artist in artists:
        artist.set_gid(_TIP + text)


def draw_curve(
    axes: Axes,
    theme: Theme,
    index: int | None,
    x: Floats,
    y: Floats,
    label: str,
    legend_text: str,
    form: str,
    dashes: int | None = None,
) -> None:
    """Draw a run's curve, with about thirty tips along it: the label, and x and y in the format `form`. `index` is the
    run's; None for a curve that does not belong to a run. `dashes` is an index of `DASHES`; by default the run's."""
    own_dashes = DASHES[(dashes if dashes is not None else index or 0) % len(DASHES)]
    color, pattern = (theme.quiet, _NOISE) if index is None else (theme.run(index), own_dashes)
    axes.plot(x, y, color=color, linestyle=pattern, linewidth=1.8, label=legend_label(legend_text))
    finite = np.flatnonzero(np.isfinite(y))
    for at in finite[:: math.ceil(len(finite) / 30) or 1]:
        # Tips need a marker, which is invisible.
        markers = axes.plot([x[at]], [y[at]], "s", color=color, markersize=12, alpha=0, scalex=False, scaley=False)
        add_tip(markers, f"{label}: {form.format(x[at], y[at])}")


def as_svg(figure: Figure, *, text_as_paths: bool) -> str:
    """Render a figure as SVG, with the same bytes each time. Text drawn as paths looks the same everywhere; other text
    uses the page's font."""
    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path" if text_as_paths else "none", "svg.hashsalt": "scoremode"}):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(f'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", content.getvalue())


def as_adaptive_svg(draw: Callable[[Theme], Figure]) -> str:
    """Render a picture as one SVG file that is dark on dark pages. `<picture>` would break on hubs that do not rewrite
    `srcset`."""
    svg = as_svg(draw(LIGHT), text_as_paths=True)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    light, dark = (
        "".join(f"--plot-{name}:{color};" for name, color in zip(_NAMES, _colors(theme), strict=True))
        for theme in (LIGHT, DARK)
    )
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    return re.sub(r"<svg [^>]*>", lambda match: match[0] + style, svg, count=1)


def as_element(figure: Figure, name: str, label: str) -> str:
    """Turn a figure drawn with `LIGHT` into an `svg` element, which scales, and uses the page's variables for colors.
    The element's ids begin with `name`, and `label` is its description. Text in it is escaped."""
    root = ElementTree.fromstring(as_svg(figure, text_as_paths=False))
    for element in list(root.iter()):
        for child in element.findall(f"{_SVG}metadata") + element.findall(f"{_SVG}style"):
            element.remove(child)
        _set_attributes(element, prefix=f"{name}-")
        element.tag = element.tag.removeprefix(_SVG)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _set_attributes(element: ElementTree.Element, prefix: str) -> None:
    """Prefix the element's ids, and turn its `style` into attributes."""
    for declaration in filter(None, map(str.strip, element.attrib.pop("style", "").split(";"))):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name == "font":
            # Keep only the size, because the page has its own font.
            name, value = "font-size", re.findall(r"[\d.]+(?=px)", value)[0]
        element.set(name, _VARIABLES.get(value, value))
    if "id" in element.attrib:
        element.set("id", prefix + element.attrib["id"])
    if _HREF in element.attrib:
        element.set("href", element.attrib.pop(_HREF).replace("#", f"#{prefix}"))
    for name, value in element.attrib.items():
        element.set(name, value.replace("url(#", f"url(#{prefix}"))
