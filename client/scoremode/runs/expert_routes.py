"""Computes how a served model's choices of experts agree with a reference's, and how much divergence they cause.

A window is compared twice: with the served model's own experts, and with the reference's, which are forced upon it. The
divergence that is left in the second pass is rounding; the rest is rerouting. docs/routes.md explains the figures.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from scoremode.kld import Floats, clustered_standard_error, error_of_sums
from scoremode.metrics import finite_or_none
from scoremode.results import KldWindowValues
from scoremode.runs.report import Arrays
from scoremode.wire import ReferenceRoutes, wrong_value

_FACTOR = 2
"""A router stands out if it disagrees more than this many times as often as that of any other layer."""


class ClusteredMean(BaseModel):
    """A mean over targets with its standard error, which takes only windows as independent."""

    model_config = ConfigDict(allow_inf_nan=False)

    mean: float | None
    """None without targets, or if a value is infinite."""
    stderr: float | None
    """None for fewer than two windows, or without a mean."""

    @property
    def ends(self) -> tuple[float, float]:
        """A share minus and plus two errors; 0 and 1 without an error."""
        if self.mean is None or self.stderr is None:
            return 0.0, 1.0
        return self.mean - 2 * self.stderr, self.mean + 2 * self.stderr

    @classmethod
    def from_values(cls, values: Floats, window_sizes: NDArray[np.integer[Any]]) -> Self:
        """The mean of values [n], of which each window has as many as `window_sizes` says, perhaps none."""
        if not len(values) or not np.isfinite(values).all():
            return cls(mean=None, stderr=None)
        error = clustered_standard_error(values, window_sizes)
        return cls(mean=float(values.mean()), stderr=finite_or_none(error))


class RoutedLayer(BaseModel):
    """The choices of experts in one layer. Shares are of all targets."""

    name: str
    same_set: ClusteredMean
    """The share of targets for which both models choose the same experts."""
    same_first: ClusteredMean
    """The share for which the same expert has the largest weight."""
    overlap: ClusteredMean
    """The mean share of a target's experts that both models choose."""
    forced_same_set: ClusteredMean
    """As `same_set`, for the choice that the router would make where all layers use the reference's experts."""


class ExpertRoutes(BaseModel):
    """The figures of a run that compares choices of experts. Divergences are in nats."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    num_experts: PositiveInt
    top_k: PositiveInt
    own: ClusteredMean
    """The KL divergence with the served model's own experts, which is the sum of `forced` and `rerouting`."""
    forced: ClusteredMean
    """The KL divergence with the reference's experts: that of rounding."""
    rerouting: ClusteredMean
    """The KL divergence that other experts add. Its error is of the differences at each target."""
    same_experts: ClusteredMean
    """The share of targets with the same set of experts, over all layers."""
    differing_layers: list[NonNegativeInt]
    """The number of targets for which 0, 1, 2, ... layers choose other experts, up to all layers."""
    kld_same: ClusteredMean
    """The KL divergence, with own experts, of targets for which all layers choose the same; `kld_other` of the rest."""
    kld_other: ClusteredMean
    layers: list[RoutedLayer]
    arrays: Arrays = Field({}, exclude=True)
    """`forced_kld` and `differing_layers` of every target, [n], in the order of windows. A run's JSON has no arrays."""

    @classmethod
    @np.errstate(invalid="ignore")
    def from_windows(cls, windows: Sequence[KldWindowValues], routes: ReferenceRoutes) -> Self:
        """Compute the figures of all windows of a reference, each of which `fits_routes`."""
        sizes = np.array([window.num_scored for window in windows])
        forced_windows = [window.forced for window in windows if window.forced is not None]
        kld, forced_kld = (
            np.concatenate([window.positions.kld for window in each]).astype(np.float64)
            for each in (windows, forced_windows)
        )
        differing = np.concatenate([window.routes.differing_layers for window in windows if window.routes is not None])
        window_of = np.repeat(np.arange(len(sizes)), sizes)
        kld_same, kld_other = (
            ClusteredMean.from_values(kld[chosen], np.bincount(window_of[chosen], minlength=len(sizes)))
            for chosen in (differing == 0, differing > 0)
        )
        names = ("name", "same_set", "same_first", "overlap", "forced_same_set")
        columns = (
            routes.layers,
            _shares(windows, "same_set", sizes),
            _shares(windows, "same_first", sizes),
            _shares(windows, "shared", routes.top_k * sizes),
            _shares(forced_windows, "same_set", sizes),
        )
        return cls(
            num_experts=routes.num_experts,
            top_k=routes.top_k,
            own=ClusteredMean.from_values(kld, sizes),
            forced=ClusteredMean.from_values(forced_kld, sizes),
            # Infinity minus infinity is not finite either, so its mean is None.
            rerouting=ClusteredMean.from_values(kld - forced_kld, sizes),
            same_experts=ClusteredMean.from_values(1 - differing / len(routes.layers), sizes),
            differing_layers=np.bincount(differing, minlength=len(routes.layers) + 1).tolist(),
            kld_same=kld_same,
            kld_other=kld_other,
            layers=[
                RoutedLayer.model_validate(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)
            ],
            arrays={"forced_kld": forced_kld.astype(np.float32), "differing_layers": differing.astype(np.int32)},
        )

    @property
    def standing_out(self) -> RoutedLayer | None:
        """The layer whose router itself differs, if one clearly does.

        In the forced pass every layer gets inputs that the reference's experts computed, so a router that still
        disagrees does so by itself, or because of rounding before it. A layer stands out if its router disagrees more
        than twice as often as that of any other layer, and the intervals of two clustered errors around both shares do
        not overlap. A model with one layer, or a run with one window, has none.
        """
        lowest, *others = sorted(self.layers, key=lambda layer: layer.forced_same_set.mean or 0.0)
        share = lowest.forced_same_set
        stands_out = bool(others) and all(
            1 - (share.mean or 0.0) > _FACTOR * (1 - (other.mean or 0.0)) and share.ends[1] < other.ends[0]
            for other in (layer.forced_same_set for layer in others)
        )
        return lowest if stands_out else None


def fits_routes(window: KldWindowValues, routes: ReferenceRoutes) -> bool:
    """Whether both passes of a window have counts of all layers that agree with each other."""
    for part in (window, window.forced):
        if part is None or part.routes is None or part.num_scored != window.num_scored:
            return False
        counts, num_layers = part.routes, len(routes.layers)
        if {len(counts.same_set), len(counts.same_first), len(counts.shared)} != {num_layers}:
            return False
        differing = counts.differing_layers
        is_possible = not wrong_value("differing_layers", differing) and (differing <= num_layers).all()
        if not is_possible or differing.sum() != num_layers * part.num_scored - sum(counts.same_set):
            return False
    return True


def _shares(windows: Sequence[KldWindowValues], name: str, sizes: NDArray[np.integer[Any]]) -> list[ClusteredMean]:
    """The share of a count for each layer; `sizes` are the windows' largest possible counts."""
    counts = np.array([getattr(window.routes, name) for window in windows])
    return [
        ClusteredMean(mean=float(sums.sum() / sizes.sum()), stderr=finite_or_none(error_of_sums(sums, sizes)))
        for sums in counts.T
    ]
