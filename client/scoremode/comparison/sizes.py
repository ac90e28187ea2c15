"""Finds the sizes of runs, in GiB or bits per weight, and the runs that no smaller run beats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scoremode.comparison.figures import Figure, RunComparison, Size
from scoremode.comparison.run_file import RunFile

MIN_FRONT = 3
"""The fewest runs for a Pareto front and a table of the best; fewer are easily compared without."""
_AXES: dict[Size, str] = {"gib": "weight files (GiB)", "bits_per_weight": "bits per weight"}


@dataclass(frozen=True, slots=True)
class Point:
    """A run in a plot."""

    index: int
    """The run's index in the comparison, which decides its color and marker."""
    label: str
    size: float
    """The size; 0 if it is not known."""
    value: float
    low: float
    high: float


def points(comparison: RunComparison, figures: Sequence[Figure | None]) -> tuple[str | None, list[Point]]:
    """Return the name of the size axis, or None if a run's size is missing or all sizes are equal, and a point for each
    finite figure.

    An end of an interval that is unknown or infinite is the value itself. On a size axis, references of unknown size
    are left out. So are simulated quantizations, whose files do not have the size that they simulate.
    """
    runs = comparison.files
    sized = [run for run in runs if not is_simulated(run, comparison.base)]
    names = [name for name in _AXES if all(run.is_reference or getattr(run, name) is not None for run in sized)]
    name = comparison.size if comparison.size in names else next(iter(names), None)
    if name is not None and len(runs) > 1 and len({getattr(run, name) for run in sized} - {None}) < 2:
        name = None
    sizes: list[float | None] = [0.0] * len(runs)
    if name is not None:
        sizes = [getattr(run, name) if run in sized else None for run in runs]
    all_points = []
    for index, (run, size, figure) in enumerate(zip(runs, sizes, figures, strict=True)):
        if figure is not None and size is not None and math.isfinite(figure.value):
            ends = (figure.value if end is None or math.isinf(end) else end for end in (figure.low, figure.high))
            all_points.append(Point(index, run.label, size, figure.value, *ends))
    return None if name is None else _AXES[name], all_points


def is_simulated(run: RunFile, base: RunFile) -> bool:
    """Whether a run simulates a quantization, and `--bits` does not give its size. Such a run has other weights than
    the base, not quantized and at least as large, so its files do not show the quantized size."""
    server, original = run.server, base.server
    has_other_weights = server.fingerprint not in (None, original.fingerprint)
    sizes = (server.weight_bytes, original.weight_bytes)
    is_as_large = sizes[0] is not None and sizes[1] is not None and sizes[0] >= sizes[1]
    return run.simulated_bits is None and server.quantization is None and has_other_weights and is_as_large


def pareto_front(all_points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats in both size and value, the smallest first."""
    front: list[Point] = []
    for point in sorted(all_points, key=lambda point: (point.size, point.value)):
        if not front or point.value < front[-1].value:
            front.append(point)
    return front
