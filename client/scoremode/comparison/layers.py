"""Compares runs of `ppl-client layers`: a table, and bars by depth for the report."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from pydantic import BaseModel

from scoremode._texts import Column, aligned, model_name, printable
from scoremode.comparison.compare import check_labels
from scoremode.comparison.plot_style import LIGHT, add_tip, as_element, new_axes
from scoremode.comparison.run_file import labels_of
from scoremode.comparison.tables import paragraphs
from scoremode.errors import RunError
from scoremode.runs import Cost, PartCost, PartKind, few_windows, read_run, reference_in_words, weights_in_words
from scoremode.wire import Reference, ServerInfo

_COLORS: dict[PartKind, str] = {
    **dict.fromkeys(("mlp", "moe"), LIGHT.run(1)),
    **dict.fromkeys(("embeddings", "head"), LIGHT.quiet),
    "layer": LIGHT.run(2),
}
_MIXER_COLOR = LIGHT.run(0)
_KEY = {"quiet": "embeddings, head", "run-0": "mixer", "run-1": "MLP or experts", "run-2": "whole layer"}
"""The key of the plots: each color's name, and the kinds of parts that have this color."""
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")
_MOST_TICKS = 12


class LayersRun(BaseModel):
    """The content of a file that `ppl-client layers --output` wrote."""

    kind: Literal["layers"]
    model: str
    server: ServerInfo
    reference: Reference
    whole: Cost
    embeddings: PartCost
    blocks: list[PartCost]
    head: PartCost

    @property
    def parts(self) -> list[PartCost]:
        """All parts, in the order of the model."""
        return [self.embeddings, *self.blocks, self.head]


def load_layers(paths: Sequence[Path], labels: Sequence[str] | None = None) -> dict[str, LayersRun]:
    """Load runs, by label. RunError if a file cannot be read, or the runs have different originals, texts or layers."""
    runs = [read_run(path, LayersRun, "layers") for path in paths]
    labels = labels_of(labels, [model_name(run.model) for run in runs], paths)
    check_labels(labels)
    for path, run in zip(paths, runs, strict=True):
        if _identity(run) != _identity(runs[0]):
            raise RunError(f"{path} has another original, text or layers than {paths[0]}")
    return dict(zip(labels, runs, strict=True))


def _identity(run: LayersRun) -> tuple[Any, ...]:
    return run.reference.fingerprint, run.reference.text_fingerprint, [block.name for block in run.blocks]


@dataclass(frozen=True, slots=True)
class LayersSection:
    """The section of a report about runs of `ppl-client layers`."""

    title: str
    notes: list[str]
    key: Mapping[str, str]
    panels: list[tuple[str, str, str]]
    """One panel per run: its label, its description, and its `svg` element."""
    table: list[Column]


def layers_as_text(runs: Mapping[str, LayersRun]) -> str:
    """Format the cost of each part of the model in each run, in the order of the model."""
    notes = ["nats per token; * not above the floor", *few_windows(_reference(runs))]
    return paragraphs(aligned(_columns(runs)), notes)


def layers_section(runs: Mapping[str, LayersRun]) -> LayersSection:
    """Make the section: each run's costs as bars by depth, on one scale, and the table of their values."""
    reference = _reference(runs)
    drawings = {label: _bars(run) for label, run in runs.items()}
    lows, highs = zip(*(drawing.axes[0].get_ylim() for drawing in drawings.values()), strict=True)
    for drawing in drawings.values():
        drawing.axes[0].set_ylim(min(lows), max(highs))
    original = f"{reference.model}, {reference_in_words(reference)}"
    return LayersSection(
        f"Cost of layers: {', '.join(runs)}",
        [
            f"Nats per token of the KL divergence from {original}, over {reference.num_scored:,} tokens.",
            "All bars add up to the whole divergence. Paler bars are not above the floor.",
            *few_windows(reference),
        ],
        _KEY,
        [
            (label, f"{weights_in_words(run.server)}; whole model: {run.whole.in_words} nats", picture)
            for place, (label, run) in enumerate(runs.items())
            for picture in (as_element(drawings[label], f"layers-{place}", f"Cost of the layers of {label}"),)
        ],
        _columns(runs),
    )


def _reference(runs: Mapping[str, LayersRun]) -> Reference:
    return next(iter(runs.values())).reference


def _columns(runs: Mapping[str, LayersRun]) -> list[Column]:
    first = next(iter(runs.values()))
    columns = [Column("part", ["whole model", *(printable(part.name) for part in first.parts)], right=False)]
    for label, run in runs.items():
        costs = [f"{part.in_words}{'' if part.is_above_floor else ' *'}" for part in run.parts]
        columns.append(Column(label, [run.whole.in_words, *costs], right=False))
    return columns


def _bars(run: LayersRun) -> Figure:
    """Draw the cost of each part of a run with its error, and the numbers of layers on the axis."""
    drawing, axes = new_axes(LIGHT)
    for depth, part in enumerate(run.parts):
        bar = axes.bar(
            depth,
            part.cost,
            yerr=part.stderr,
            color=_COLORS.get(part.kind, _MIXER_COLOR),
            error_kw={"ecolor": LIGHT.ink, "linewidth": 1},
            alpha=1 if part.is_above_floor else 0.35,
        )
        more = "" if part.is_above_floor else ", not above the floor"
        add_tip(bar, f"{printable(part.name)} ({part.kind}): {part.in_words} nats{more}")
    axes.axhline(0, color=LIGHT.ink, linewidth=1)
    axes.set(xlabel="layer", ylabel="nats per token")
    axes.grid(visible=False, axis="x")
    ticks = _layer_ticks([part.name for part in run.parts])
    axes.set_xticks([*ticks.values()], [*ticks])
    return drawing


def _layer_ticks(names: Sequence[str]) -> dict[str, float]:
    """The middle of each layer's bars on the axis, by the layer's number, for at most about a dozen layers."""
    places: dict[int, list[int]] = {}
    for place, name in enumerate(names):
        if match := _LAYER.search(name):
            places.setdefault(int(match[1]), []).append(place)
    step = math.ceil(len(places) / _MOST_TICKS) or 1
    return {str(number): sum(at) / len(at) for number, at in places.items() if number % step == 0}
