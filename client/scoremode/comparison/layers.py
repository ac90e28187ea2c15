"""Runs of `ppl-client layers` next to each other: a table, and bars by depth in one HTML file that loads nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from scoremode._texts import model_name, printable
from scoremode.comparison.report import policy_hash
from scoremode.errors import RunError, file_errors
from scoremode.runs.layers import PartKind
from scoremode.runs.report import weights_in_words
from scoremode.wire.protocol import ServerInfo
from scoremode.wire.references import Reference

_TEMPLATES = Path(__file__).with_name("templates")
WIDTH, HEIGHT, MARGIN = 640.0, 260.0, 56.0
"""Of a panel in pixels, and of what is left of the bars."""
_COLORS: dict[PartKind, int] = {"mlp": 1, "moe": 1, "embeddings": 2, "head": 2, "layer": 3}
"""Places of colors; mixers have the first."""


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Part:
    """A part's cost in nats per token, and what is known of it."""

    name: str
    kind: PartKind
    cost: float
    stderr: float | None
    is_above_floor: bool


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class _Whole:
    cost: float
    stderr: float | None


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class _Record:
    model: str
    server: ServerInfo
    reference: Reference
    whole: _Whole
    embeddings: Part
    blocks: list[Part]
    head: Part


@dataclass(frozen=True, slots=True)
class LayersRun:
    """One run; `parts` are in the order of the model."""

    label: str
    weights: str
    reference: Reference
    whole: _Whole
    parts: list[Part]


_RECORD = TypeAdapter(_Record)


def is_layers_file(path: Path) -> bool:
    """Whether a file is a run of `ppl-client layers`. One that cannot be read is not: who reads it says why."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "layers"


def load_layers(paths: Sequence[Path], labels: Sequence[str] | None = None) -> list[LayersRun]:
    """Load runs of one original over one text. RunError if one cannot be read, or they do not fit each other."""
    records = [_load(path) for path in paths]
    names = list(labels or [model_name(record.model) for record in records])
    if len(set(names)) < len(names):
        names = [path.stem for path in paths]
    first = records[0]
    for path, record in zip(paths, records, strict=True):
        if _identity(record) != _identity(first):
            raise RunError(f"{path} has another original, text or other layers than {paths[0]}")
    return [
        LayersRun(
            printable(name),
            weights_in_words(record.server),
            record.reference,
            record.whole,
            [record.embeddings, *record.blocks, record.head],
        )
        for name, record in zip(names, records, strict=True)
    ]


def _load(path: Path) -> _Record:
    with file_errors(RunError, f"read {path}"):
        content = path.read_text("utf-8")
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.get("kind") != "layers":
            raise RunError(f"{path} is not a run of ppl-client layers, which are compared with each other alone")
        return _RECORD.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError:
        raise RunError(f"{path} is not JSON, or is cut short") from None


def _identity(record: _Record) -> tuple[Any, ...]:
    reference = record.reference
    return reference.fingerprint, reference.text_fingerprint, [block.name for block in record.blocks]


def layers_as_text(runs: Sequence[LayersRun]) -> str:
    """The cost of each part in each run, in the order of the model."""
    names = ["whole model", *(printable(part.name) for part in runs[0].parts)]
    columns = [["part", *names]]
    for run in runs:
        costs = [_pair(run.whole.cost, run.whole.stderr), *(_pair(part.cost, part.stderr) for part in run.parts)]
        marks = ["", *("" if part.is_above_floor else " *" for part in run.parts)]
        columns.append([run.label, *(f"{cost}{mark:2}" for cost, mark in zip(costs, marks, strict=True))])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        f"{name:{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        for name, *cells in zip(*columns, strict=True)
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", "nats per token; * not above the floor", ""])


def write_layers_report(runs: Sequence[LayersRun], path: Path) -> None:
    """Write the bars of each run by depth, side by side and to one scale."""
    style = (_TEMPLATES / "report.css").read_text("utf-8") + (_TEMPLATES / "layers.css").read_text("utf-8")
    highest = max(part.cost + (part.stderr or 0) for run in runs for part in run.parts)
    lowest = min(0.0, *(part.cost - (part.stderr or 0) for run in runs for part in run.parts))
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template("layers.html.j2").render(
        title=", ".join(run.label for run in runs),
        style=Markup(style),
        style_hash=policy_hash(style),
        reference=runs[0].reference,
        original=weights_in_words(runs[0].reference),
        panels=[_panel(run, lowest, max(highest, lowest + 1e-12)) for run in runs],
        table=layers_as_text(runs),
        size=(WIDTH + MARGIN, HEIGHT + MARGIN),
        margin=MARGIN,
    )
    path.write_text(html, encoding="utf-8")


def _panel(run: LayersRun, lowest: float, highest: float) -> Mapping[str, Any]:
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
                "tip": f"{printable(part.name)} ({part.kind}): {_pair(part.cost, part.stderr)} nats"
                + ("" if part.is_above_floor else ", not above the floor"),
            }
        )
    return {
        "label": run.label,
        "weights": run.weights,
        "whole": _pair(run.whole.cost, run.whole.stderr),
        "bars": bars,
        "ticks": [(y(cost), f"{cost:.2g}") for cost in (0.0, highest / 2, highest)],
        "zero": y(0.0),
    }


def _pair(cost: float, stderr: float | None) -> str:
    return f"{cost:.6f} ± {'-' if stderr is None else f'{stderr:.6f}'}"
