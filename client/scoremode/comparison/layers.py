"""Runs of `ppl-client layers` next to each other: a table, and bars by depth in one HTML file that loads nothing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from scoremode._texts import model_name, printable
from scoremode.comparison.compare import check_labels
from scoremode.comparison.report import TEMPLATES, policy_hash, template_of
from scoremode.comparison.run_file import labels_of
from scoremode.errors import RunError, file_errors
from scoremode.runs.layers import Cost, PartCost, PartKind
from scoremode.runs.report import weights_in_words
from scoremode.wire.protocol import ServerInfo
from scoremode.wire.references import Reference

WIDTH, HEIGHT, MARGIN = 640.0, 260.0, 56.0
"""Of a panel in pixels, and of what is left of the bars."""
_COLORS: dict[PartKind, int] = {"mlp": 1, "moe": 1, "embeddings": 2, "head": 2, "layer": 3}
"""Places of colors; mixers have the first."""


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class LayersRun:
    """A run as its file has it."""

    model: str
    server: ServerInfo
    reference: Reference
    whole: Cost
    embeddings: PartCost
    blocks: list[PartCost]
    head: PartCost

    @property
    def parts(self) -> list[PartCost]:
        """In the order of the model."""
        return [self.embeddings, *self.blocks, self.head]


def is_layers_file(path: Path) -> bool:
    """Whether a file is a run of `ppl-client layers`. One that cannot be read is not: who reads it says why."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == "layers"


def load_layers(paths: Sequence[Path], labels: Sequence[str] | None = None) -> dict[str, LayersRun]:
    """Load runs of one original over one text, by their labels. RunError if one cannot be read, or they do not fit each
    other."""
    runs = [_load(path) for path in paths]
    labels = labels_of(labels, [model_name(run.model) for run in runs], paths)
    check_labels(labels)
    for path, run in zip(paths, runs, strict=True):
        if _identity(run) != _identity(runs[0]):
            raise RunError(f"{path} has another original, text or other layers than {paths[0]}")
    return dict(zip(labels, runs, strict=True))


def _load(path: Path) -> LayersRun:
    with file_errors(RunError, f"read {path}"):
        content = path.read_text("utf-8")
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.get("kind") != "layers":
            raise RunError(f"{path} is not a run of ppl-client layers, which are compared with each other alone")
        return LayersRun(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is not JSON, or is cut short") from None


def _identity(run: LayersRun) -> tuple[Any, ...]:
    return run.reference.fingerprint, run.reference.text_fingerprint, [block.name for block in run.blocks]


def layers_as_text(runs: Mapping[str, LayersRun]) -> str:
    """The cost of each part in each run, in the order of the model."""
    first = next(iter(runs.values()))
    columns = [["part", "whole model", *(printable(part.name) for part in first.parts)]]
    for label, run in runs.items():
        cells = [f"{part.in_words}{'  ' if part.is_above_floor else ' *'}" for part in run.parts]
        columns.append([label, f"{run.whole.in_words}  ", *cells])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        f"{name:{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        for name, *cells in zip(*columns, strict=True)
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", "nats per token; * not above the floor", ""])


def write_layers_report(runs: Mapping[str, LayersRun], path: Path) -> None:
    """Write the bars of each run by depth, side by side and to one scale."""
    reference = next(iter(runs.values())).reference
    style = (TEMPLATES / "report.css").read_text("utf-8") + (TEMPLATES / "layers.css").read_text("utf-8")
    highest = max(part.cost + (part.stderr or 0) for run in runs.values() for part in run.parts)
    lowest = min(0.0, *(part.cost - (part.stderr or 0) for run in runs.values() for part in run.parts))
    html = template_of("layers.html.j2").render(
        title=", ".join(runs),
        style=Markup(style),
        style_hash=policy_hash(style),
        reference=reference,
        original=weights_in_words(reference),
        panels=[_panel(label, run, lowest, max(highest, lowest + 1e-12)) for label, run in runs.items()],
        table=layers_as_text(runs),
        size=(WIDTH + MARGIN, HEIGHT + MARGIN),
        margin=MARGIN,
    )
    path.write_text(html, encoding="utf-8")


def _panel(label: str, run: LayersRun, lowest: float, highest: float) -> Mapping[str, Any]:
    """The picture of a run: places in pixels."""

    def y(cost: float) -> float:
        return round(HEIGHT * (highest - cost) / (highest - lowest), 2)

    step = WIDTH / len(run.parts)
    bars = []
    for index, part in enumerate(run.parts):
        top, bottom = sorted((y(part.cost), y(0.0)))
        ends = None if part.stderr is None else (y(part.cost - part.stderr), y(part.cost + part.stderr))
        bars.append(
            {
                "x": round(MARGIN + index * step, 2),
                "width": round(0.8 * step, 2),
                "y": top,
                "height": max(0.5, round(bottom - top, 2)),
                "middle": round(MARGIN + (index + 0.4) * step, 2),
                "ends": ends,
                "color": _COLORS.get(part.kind, 0),
                "is_faint": not part.is_above_floor,
                "tip": f"{printable(part.name)} ({part.kind}): {part.in_words} nats"
                + ("" if part.is_above_floor else ", not above the floor"),
            }
        )
    return {
        "label": label,
        "weights": weights_in_words(run.server),
        "whole": run.whole.in_words,
        "bars": bars,
        "ticks": [(y(cost), f"{cost:.2g}") for cost in (0.0, highest / 2, highest)],
        "zero": y(0.0),
    }
