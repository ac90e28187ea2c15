"""A plot as part of a page: in the colours of the page's CSS variables, without styles that a strict policy blocks."""

import re
from xml.etree import ElementTree

from scoremode.comparison.plot_style import LIGHT, as_svg
from scoremode.comparison.plots import Plot

_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_VARIABLES = {
    **{getattr(LIGHT, name): f"var(--plot-{name})" for name in ("paper", "ink", "quiet", "grid")},
    **{color: f"var(--plot-run-{index})" for index, color in enumerate(LIGHT.runs)},
}
_FONT_SIZE = re.compile(r"[\d.]+(?=px)")


def inline_svg(plot: Plot) -> str:
    """The plot as an `svg` element that scales to its place. Names in it are text, escaped."""
    root = ElementTree.fromstring(as_svg(plot.draw(LIGHT), text_as_paths=False))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _take_attributes(element, prefix=f"{plot.name}-")
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    for name in ("width", "height"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": plot.subject}
    return ElementTree.tostring(root, encoding="unicode")


def _take_attributes(element: ElementTree.Element, prefix: str) -> None:
    """Ids that no other plot of the page has, and attributes in place of `style`."""
    attributes = dict(element.attrib)
    element.attrib.clear()
    for name, value in attributes.items():
        if name == "id":
            element.set("id", prefix + value)
        elif name == _HREF:
            element.set("href", value.replace("#", f"#{prefix}"))
        elif name != "style":
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
    for declaration in filter(None, map(str.strip, attributes.get("style", "").split(";"))):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name == "font":
            # The family is the page's.
            name, value = "font-size", _FONT_SIZE.findall(value)[0]
        element.set(name, _VARIABLES.get(value, value))
