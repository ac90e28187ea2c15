"""Runs of `ppl-client layers` next to each other: a table, and bars by depth in one HTML file that loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import BaseModel, ValidationError

from scoremode._texts import first_fault, model_name, printable
from scoremode.comparison.compare import check_labels
from scoremode.comparison.plot_style import LIGHT, add_tip, as_element, new_axes
from scoremode.comparison.report import TEMPLATES, policy_hash, template_of
from scoremode.comparison.run_file import labels_of
from scoremode.comparison.tables import Column, aligned, paragraphs
from scoremode.errors import RunError, file_errors
from scoremode.runs import Cost, PartCost, PartKind, weights_in_words, write_whole
from scoremode.wire import Reference, ServerInfo

_COLORS: dict[PartKind, str] = {
    **dict.fromkeys(("mlp", "moe"), LIGHT.run(1)),
    **dict.fromkeys(("embeddings", "head"), LIGHT.quiet),
    "layer": LIGHT.run(2),
}
_MIXER_COLOR = LIGHT.run(0)


class LayersRun(BaseModel):
    """A run as its file has it."""

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
        """In the order of the model."""
        return [self.embeddings, *self.blocks, self.head]


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
        content = path.read_bytes()
    try:
        return LayersRun.model_validate_json(content)
    except ValidationError as error:
        reason = f"{path} is not a run of ppl-client layers, which are compared with each other alone"
        raise RunError(f"{reason}: {first_fault(error)}") from None


def _identity(run: LayersRun) -> tuple[Any, ...]:
    return run.reference.fingerprint, run.reference.text_fingerprint, [block.name for block in run.blocks]


def layers_as_text(runs: Mapping[str, LayersRun]) -> str:
    """The cost of each part in each run, in the order of the model."""
    first = next(iter(runs.values()))
    columns = [Column("part", ["whole model", *(printable(part.name) for part in first.parts)], right=False)]
    for label, run in runs.items():
        costs = [f"{part.in_words}{'' if part.is_above_floor else ' *'}" for part in run.parts]
        columns.append(Column(label, [run.whole.in_words, *costs], right=False))
    return paragraphs(aligned(columns), ["nats per token; * not above the floor"])


def write_layers_report(runs: Mapping[str, LayersRun], path: Path) -> None:
    """Write the bars of each run by depth, side by side and to one scale."""
    reference = next(iter(runs.values())).reference
    style = (TEMPLATES / "report.css").read_text("utf-8") + (TEMPLATES / "layers.css").read_text("utf-8")
    drawings = {label: _bars(run) for label, run in runs.items()}
    lows, highs = zip(*(each.axes[0].get_ylim() for each in drawings.values()), strict=True)
    for each in drawings.values():
        each.axes[0].set_ylim(min(lows), max(highs))
    html = template_of("layers.html.j2").render(
        title=", ".join(runs),
        style=Markup(style),
        style_hash=policy_hash(style),
        reference=reference,
        original=weights_in_words(reference),
        panels=[
            (label, run, weights_in_words(run.server), Markup(as_element(drawings[label], f"panel-{place}", label)))
            for place, (label, run) in enumerate(runs.items())
        ],
        table=layers_as_text(runs),
    )
    write_whole(path, html.encode())


def _bars(run: LayersRun) -> Figure:
    """The cost of each part of a run, with its error."""
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
    axes.set(xlabel="depth", ylabel="nats per token", xticks=[])
    return drawing
