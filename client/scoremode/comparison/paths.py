"""Compares the kernel paths of one checkpoint: which of them differ from the default path, by how much, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, computed_field
from safetensors.numpy import load_file

from scoremode.comparison.bootstrap import cut_units
from scoremode.comparison.excess import MARGIN, Excess, excess, significant
from scoremode.comparison.groups import TokenGroup, groups_of, tokens_before
from scoremode.comparison.layers import load_layers
from scoremode.comparison.run_file import RunFile
from scoremode.kld import NEGLIGIBLE_KLD, Floats
from scoremode.runs import ARRAYS_SUFFIX, PartKind, lane_difference, range_of
from scoremode.wire import Lane, ServerInfo

PathVerdict = Literal["default", "agrees", "differs", "refused", "failed", "no verdict"]
"""A path is `refused` if nothing could be measured, and `failed` if a lane or repeat is missing. A short text has no
verdict."""
DEFAULT = "default"
"""Name of the default path."""
_LARGEST = 3
_CONFIDENCE = ("p < 0.5", "0.5 ≤ p < 0.9", "p ≥ 0.9")
"""Groups of targets by the default path's probability of its top token."""


class _Part(BaseModel):
    # A divergence may be infinite, which JSON has no number for.
    model_config = ConfigDict(ser_json_inf_nan="strings", use_attribute_docstrings=True)


class Range(_Part):
    """A part of the targets, with the mean KL divergence of a path there, and that of the default path's repeats."""

    by: str
    name: str
    num_tokens: int
    kld: float
    floor: float


class LaneFigures(_Part):
    """A path in one lane."""

    lane: Lane
    excess: Excess
    differs: bool
    """Whether the excess is more than chance, over all paths and lanes of the table."""
    differs_from: int | None
    """The position from which on every range of positions differs; None if the path agrees."""
    by_position: list[Range]
    """Ranges of positions in a window that double in length."""
    groups: list[Range]
    """Classes of tokens: by role, domain, and the default path's confidence."""
    tokens_per_second: float | None
    """Compared tokens in the first repeat; None if another server shared the GPU."""


class BlockFigures(_Part):
    """The cost of a part of the model on a path, and on the default path."""

    name: str
    kind: PartKind
    excess: Excess
    differs: bool = True
    """Whether the excess is more than chance, over all parts of the model."""


class PathRow(_Part):
    """A path of the table."""

    name: str
    reason: str | None = None
    """The error that ended the path's server, in the first measurement or when both paths were eager."""
    same_as: str | None = None
    """The first path that computes with the same kernels, as its server reports."""
    lanes: list[LaneFigures] = []
    original: Excess | None = None
    """The divergence from the original, with that of the default path as `floor`; None without an original."""
    eager: LaneFigures | None = None
    """The same path next to the default one with both eager; None if the path agrees."""
    blocks: list[BlockFigures] = []
    """The parts of the model that cost more than on the default path, by falling excess, or the largest few if none is
    known to; both paths are eager."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> PathVerdict:
        if self.name == DEFAULT:
            return "default"
        if any(lane.differs for lane in self.lanes):
            return "differs"
        if self.reason is not None:
            return "failed" if self.lanes else "refused"
        return "no verdict" if any(lane.excess.p is None for lane in self.lanes) else "agrees"


class PathsRun(_Part):
    """The content of the file that `ppl-client paths` writes."""

    kind: Literal["paths"] = "paths"
    model: str
    server: ServerInfo
    """The server of the default path."""
    text: str
    num_tokens: int
    num_windows: int
    context_length: int
    num_repeats: int
    rows: list[PathRow]

    @property
    def differing(self) -> list[PathRow]:
        return [row for row in self.rows if row.verdict == "differs"]


def lane_figures(paths: Sequence[Sequence[RunFile]], repeats: Mapping[Lane, Sequence[RunFile]]) -> list[LaneFigures]:
    """Compare the runs of each path in a lane with the default path's repeats in that lane."""
    tests = [kld_test(runs, repeats[runs[0].lane]) for runs in paths]
    return [
        _lane_figures(runs, repeats[runs[0].lane], test, differs)
        for runs, test, differs in zip(paths, tests, significant(tests), strict=True)
    ]


def kld_test(runs: Sequence[RunFile], others: Sequence[RunFile]) -> Excess:
    """Compare the divergences of a path's runs with those of others, in pairs. A server that failed may have fewer; one
    of several gives no p."""
    units = cut_units(runs[0].window_sizes, runs[0].window_documents)
    own, floors = (np.array([units.sums(_kld(run)) for run in side]) for side in (runs, others[: len(runs)]))
    test = excess(own, floors, units.sizes)
    return replace(test, low=None, high=None, p=None) if len(runs) == 1 < len(others) else test


def _lane_figures(runs: Sequence[RunFile], repeats: Sequence[RunFile], test: Excess, differs: bool) -> LaneFigures:
    run, kld, floor = runs[0], _mean_kld(runs), _mean_kld(repeats[: len(runs)])
    before = tokens_before([run])
    positions = np.ones(run.num_scored, np.int64) if before is None else np.maximum(before, 1)
    least = max(MARGIN * test.floor, NEGLIGIBLE_KLD)
    octaves = range_of(positions)
    by_position = [
        TokenGroup("position", f"{2**octave} to {2 ** (octave + 1) - 1}", octaves == octave)
        for octave in np.unique(octaves).tolist()
    ]
    groups = [group for group in groups_of([run]) if group.by != "tokens before"]
    if run.reference_confidence is not None:
        indices = np.digitize(run.reference_confidence, [0.5, 0.9])
        groups += [TokenGroup("confidence", name, indices == index) for index, name in enumerate(_CONFIDENCE)]
    return LaneFigures(
        lane=run.lane,
        excess=test,
        differs=differs,
        differs_from=lane_difference(floor, kld, positions, least).differs_from if differs else None,
        by_position=_ranges(by_position, kld, floor),
        groups=_ranges(groups, kld, floor),
        tokens_per_second=run.positions_per_second,
    )


def _ranges(groups: Sequence[TokenGroup], kld: Floats, floor: Floats) -> list[Range]:
    return [
        Range(
            by=group.by,
            name=group.name,
            num_tokens=group.num_scored,
            kld=float(kld[group.members].mean()),
            floor=float(floor[group.members].mean()),
        )
        for group in groups
        if group.num_scored
    ]


def _mean_kld(runs: Sequence[RunFile]) -> Floats:
    mean: Floats = np.mean([_kld(run) for run in runs], axis=0)
    return mean


def _kld(run: RunFile) -> Floats:
    assert run.kld is not None
    return run.kld


def block_figures(files: Sequence[Path], repeats: Sequence[Path]) -> list[BlockFigures]:
    """Compare the cost of each part on a path with its cost on the default path, given the files of `layers`, in pairs.
    Returns those parts that differ, or the largest few if none does, by falling excess."""
    parts, sides = next(iter(load_layers(files[:1]).values())).parts, (files, repeats[: len(files)])
    own, others = ([load_file(file.with_suffix(ARRAYS_SUFFIX)) for file in side] for side in sides)
    sums, floors = (np.array([arrays["kld_sums"] for arrays in side]) for side in (own, others))
    tests = part_tests(sums, floors, own[0]["window_sizes"])
    blocks = [
        BlockFigures(name=part.name, kind=part.kind, excess=test, differs=differs)
        for part, test, differs in zip(parts, tests, significant(tests), strict=True)
    ]
    blocks.sort(key=lambda block: -block.excess.value)
    return [block for block in blocks if block.differs] or blocks[:_LARGEST]


def part_tests(sums: Floats, repeats: Floats, sizes: NDArray[np.integer]) -> list[Excess]:
    """Test the cost of each part, given sums of divergences [repeats, windows, boundaries + 1] of the whole model and
    then from each boundary, and the same of the floor.

    A CPU rounds a replaced stream in 16 bits where it does not round its own, so even the default path diverges from
    itself when it is resumed. Two such divergences do not add up: a cost that exceeds the default path's by no more
    than that does not count.
    """
    means = repeats.sum(axis=1).mean(axis=0) / sizes.sum()
    inexact = np.append(np.maximum(means - means[0], NEGLIGIBLE_KLD), NEGLIGIBLE_KLD)
    costs, floors = (-np.diff(values, append=0) for values in (sums, repeats))
    return [
        excess(costs[..., part], floors[..., part], sizes, least_units=2, least=float(inexact[part : part + 2].max()))
        for part in range(sums.shape[-1])
    ]


def same_path(name: str, servers: Mapping[str, ServerInfo]) -> str | None:
    """The first path before `name` whose server reports that it computes with the same kernels, if any."""
    own, earlier = servers.get(name), takewhile(lambda item: item[0] != name, servers.items())
    if own is None or own.computed_by is None:
        return None
    kernels = attrgetter("vllm_version", "dtype", "computed_by")
    return next((other for other, server in earlier if kernels(server) == kernels(own)), None)
