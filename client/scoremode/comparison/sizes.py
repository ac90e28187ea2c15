"""Runs against what their weights take: in GiB, or in bits per weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scoremode.comparison.figures import Figure, RunComparison, Size
from scoremode.comparison.run_file import RunFile

MIN_FRONT = 3
"""Runs; fewer are told apart without a line or a table of the best."""
_AXES: dict[Size, str] = {"gib": "weight files (GiB)", "bits_per_weight": "bits per weight"}


@dataclass(frozen=True, slots=True)
class Point:
    """A run in a plot."""

    index: int
    """Its place in the comparison, which decides its color and marker."""
    label: str
    size: float
    """0 where it is not known."""
    value: float
    low: float
    high: float


def points(comparison: RunComparison, figures: Sequence[Figure | None]) -> tuple[str | None, list[Point]]:
    """The name of the size axis, None where a run's size is missing; and the runs whose figure is finite. An end that
    is not known or infinite is the value itself. Left out are references of unknown size where the runs' are known, and
    simulated quantizations, whose files have another size than what they simulate."""
    runs = comparison.files
    sized = [run for run in runs if not is_simulated(run, comparison.base)]
    known = [name for name in _AXES if all(run.is_reference or getattr(run, name) is not None for run in sized)]
    name = comparison.size if comparison.size in known else next(iter(known), None)
    if len(runs) > 1 and not any(run in sized for run in runs[1:]):
        # Against size only the base would be left.
        name = None
    sizes: list[float | None] = [0.0] * len(runs)
    if name is not None:
        sizes = [getattr(run, name) if run in sized else None for run in runs]
    drawn = []
    for index, (run, size, figure) in enumerate(zip(runs, sizes, figures, strict=True)):
        if figure is not None and size is not None and math.isfinite(figure.value):
            ends = (figure.value if end is None or math.isinf(end) else end for end in (figure.low, figure.high))
            drawn.append(Point(index, run.label, size, figure.value, *ends))
    return None if name is None else _AXES[name], drawn


def is_simulated(run: RunFile, base: RunFile) -> bool:
    """Whether a run is of other weights than the base, not quantized and at least as large, so its files do not say
    what it would take."""
    server, original = run.server, base.server
    has_other_weights = server.fingerprint not in (None, original.fingerprint)
    sizes = (server.weight_bytes, original.weight_bytes)
    is_as_large = sizes[0] is not None and sizes[1] is not None and sizes[0] >= sizes[1]
    return run.simulated_bits is None and server.quantization is None and has_other_weights and is_as_large


def pareto_front(all_points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in size and value both, the smallest first."""
    front: list[Point] = []
    for point in sorted(all_points, key=lambda point: (point.size, point.value)):
        if not front or point.value < front[-1].value:
            front.append(point)
    return front
