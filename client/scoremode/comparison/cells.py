"""Figures as cells of tables: text with errors, to the digits that errors leave, and the value that sorts them."""

import math
from dataclasses import dataclass

from scoremode.comparison.figures import NEGLIGIBLE_KLD, Figure, Metric
from scoremode.kld import MOST_FLOORS

NOT_KNOWN = "-"
_MAX_DECIMALS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: float | None = None
    errors: tuple[str, ...] = ()
    mark: str = ""
    """A class of the style sheet."""
    tip: str = ""
    """What is shown of it on demand."""

    @property
    def in_text(self) -> str:
        """The value and its errors, for a terminal or Markdown."""
        return " ".join((self.text, *self.errors)).replace("∞", "inf")

    @property
    def sort_value(self) -> str:
        """The value as JavaScript reads a number; empty where there is none."""
        return "" if self.value is None else str(self.value).replace("inf", "Infinity")


def cell_of(metric: Metric, value: Figure | float | None, digits: int | None, unit: str = "") -> Cell:
    """A value with its errors, to so many digits after the point, or to those that its error leaves."""
    if isinstance(value, Figure):
        return with_errors(value, digits, scale=metric.scale, unit=unit)
    if metric.name == "kld_over_noise_floor" and value is not None and value > MOST_FLOORS:
        return Cell(f"> {MOST_FLOORS:,}", value)
    return plain(value, digits)


def plain(value: float | None, digits: int | None = None) -> Cell:
    """A figure without errors, to so many digits after the point, or to three that count."""
    if value is None or math.isnan(value):
        return Cell(NOT_KNOWN)
    if abs(value) < NEGLIGIBLE_KLD:
        return Cell("0", value)
    return Cell(number(value, decimals(value, 3) if digits is None else digits), value)


def with_errors(
    figure: Figure | None, digits: int | None = None, *, scale: float = 1, unit: str = "", sign: str = ""
) -> Cell:
    """A figure with the error that takes tokens as independent, and the interval that does not.

    All have so many digits after the point, or as many as give the former two that count.
    """
    if figure is None or math.isnan(figure.value):
        return Cell(NOT_KNOWN)
    if abs(figure.value) < NEGLIGIBLE_KLD and figure.stderr is not None and figure.stderr < NEGLIGIBLE_KLD:
        return Cell("0", figure.value)
    digits = digits_of(figure, scale) if digits is None else digits
    errors = []
    if figure.stderr is not None:
        errors.append(f"± {number(scale * figure.stderr, digits)}")
    if figure.low is not None and figure.high is not None:
        errors.append(f"[{number(scale * figure.low, digits)}, {number(scale * figure.high, digits)}]")
    return Cell(number(scale * figure.value, digits, sign=sign) + unit, figure.value, tuple(errors))


def digits_of(figure: Figure, scale: float) -> int:
    return decimals(scale * figure.stderr, 2) if figure.stderr else decimals(scale * figure.value, 3)


def decimals(size: float, significant: int) -> int:
    """Digits after the point that show so many of a number's own."""
    if not size or not math.isfinite(size):
        return 0
    return min(_MAX_DECIMALS, max(0, significant - 1 - math.floor(math.log10(abs(size)))))


def number(value: float, digits: int, sign: str = "") -> str:
    """A number as a table has it, never in powers of ten."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else NOT_KNOWN
    return f"{value:{sign},.{digits}f}"
