"""Writes a comparison as one HTML file, which loads nothing else, opens from disk, and can be printed."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from scoremode._texts import printable
from scoremode.comparison.accuracy_tables import accuracy_notes, report_sections
from scoremode.comparison.agreement import has_answers
from scoremode.comparison.card import card
from scoremode.comparison.figures import RunComparison
from scoremode.comparison.layers import LayersRun, layers_section
from scoremode.comparison.parity import parity_plots
from scoremode.comparison.path_tables import paths_view
from scoremode.comparison.paths import PathsRun
from scoremode.comparison.plot_style import LIGHT, as_element
from scoremode.comparison.plots import EXPERT_ROUTES, Plot, common_caption, plots
from scoremode.comparison.report_data import script_json, text_data
from scoremode.comparison.report_tables import pair_matrices, parted_answers, run_table
from scoremode.comparison.summary import computed_differently, in_words, summary, verdict_line
from scoremode.comparison.tables import best_at_each_size, group_notes, group_tables, routes_table
from scoremode.runs import ParityRun, parity_tables, reference_in_words, write_whole

TEMPLATES = Path(__file__).with_name("templates")
MAX_BYTES = 30_000_000
"""Default limit on the file's bytes: browsers open such a file quickly, and mail servers accept it."""
_MAX_NAMED = 8
"""Limit on the runs in the title."""
_Pair = tuple[str, str]


def write_report(
    comparison: RunComparison | None,
    path: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    layers: Mapping[str, LayersRun] | None = None,
    paths: PathsRun | None = None,
    parity: ParityRun | None = None,
) -> None:
    """Write the report. OSError or OutputError if the file cannot be written.

    Args:
        comparison: The runs and their figures; None for a report on layers, paths or parity alone.
        path: The HTML file.
        max_bytes: Limit on the file's bytes. The text of the most divergent passages is included as far as it fits.
            Tables, plots and means of all passages are always included.
        layers: Runs of `ppl-client layers` to show as well, by their labels.
        paths: A run of `ppl-client paths` to show as well.
        parity: A run of `ppl-client parity` to show as well.
    """
    names = ("report.css", "report.js", "report_actions.js")
    style, *scripts = ((TEMPLATES / name).read_text("utf-8") for name in names)
    section = layers_section(layers) if layers else None
    view = None if paths is None else paths_view(paths)
    context = {
        "comparison": comparison,
        "layers": section,
        "paths": view,
        "paths_svg": None if view is None or view.plot is None else _svg(view.plot),
        "parity": parity,
        "parity_plots": [] if parity is None else [(plot, _svg(plot)) for plot in parity_plots(parity)],
        "parity_tables": [] if parity is None else [*parity_tables(parity)],
        "title": ", ".join(part.title for part in (section, view, parity) if part is not None),
        "style": Markup(style),
        "style_hash": _policy_hash(style),
        "script": Markup("".join(scripts)),
        "script_hash": _policy_hash("".join(scripts)),
    }
    template = _template()
    if comparison is None:
        html = template.render(**context)
    else:
        context |= _context(comparison)
        without_text = template.render(**context, data="", text_note="")
        data = text_data(comparison.files, max_bytes - len(without_text.encode()) - 1000)
        data["largest_kld"] = _largest_kld(comparison)
        html = template.render(**context, data=Markup(script_json(data)), text_note=_text_note(comparison, data))
    write_whole(Path(path), html.encode())


def _text_note(comparison: RunComparison, data: dict[str, Any]) -> str:
    note, num_kept, num_tokens = "Values are rounded to 16 bits.", data["num_kept"], comparison.base.num_scored
    if num_kept == num_tokens:
        return note
    part = f"The text of {num_kept:,} of {num_tokens:,} tokens is here, from the most divergent passages"
    return f"{part}; the others have their mean. {note}"


def _context(comparison: RunComparison) -> dict[str, Any]:
    columns, rows = run_table(comparison)
    runs, tasks = comparison.files, comparison.tasks
    more = [f"{len(runs) - _MAX_NAMED} more"] if len(runs) > _MAX_NAMED else []
    warnings = computed_differently(runs)
    settings, run_settings = _settings(comparison)
    # The page describes the measurement once, so plots have no note.
    drawn = [(plot, _svg(replace(plot, note=""))) for plot in plots(comparison)]
    # Leave out the base, unless it is the only run.
    shown = comparison.rows[1:] or comparison.rows
    options = ["--resamples", str(comparison.num_resamples), "--seed", str(comparison.seed)]
    return {
        "title": ", ".join([*(run.label for run in runs[:_MAX_NAMED]), *more]),
        "measured": common_caption(comparison),
        "sentences": [sentence for sentence in summary(comparison) if sentence not in warnings],
        "columns": columns,
        "rows": rows,
        "best": best_at_each_size(comparison),
        "card": card(comparison),
        "verdicts": [(row.run.label, verdict_line(comparison, row).removeprefix(row.run.label)) for row in shown],
        "warnings": warnings,
        "matrices": pair_matrices(comparison),
        "groups": list(group_tables(comparison)),
        "group_notes": group_notes(comparison),
        "answers": [
            (run.label, parted)
            for run in (file.answers or file for file in runs)
            if has_answers(run, are_greedy=True) and (parted := parted_answers(run))[0].cells
        ],
        "accuracies": [] if tasks is None else [*report_sections(tasks)],
        "accuracy_notes": [] if tasks is None else accuracy_notes(tasks),
        "base_of_tasks": "" if tasks is None else tasks.base,
        "has_kld": _largest_kld(comparison) is not None,
        "plots": [pair for pair in drawn if pair[0].name != EXPERT_ROUTES],
        "route_plots": [pair for pair in drawn if pair[0].name == EXPERT_ROUTES],
        "routes": routes_table(comparison),
        "settings": settings,
        "run_settings": run_settings,
        # The command runs in the folder of the runs, and writes the report there.
        "command": comparison.command(*options, "--html", "report.html"),
    }


def _svg(plot: Plot) -> Markup:
    return Markup(as_element(plot.draw(LIGHT), plot.name, plot.subject))


def _settings(comparison: RunComparison) -> tuple[list[_Pair], list[tuple[str, list[_Pair]]]]:
    """The settings that all runs share, and by label each run's settings in which runs differ, as names and values."""
    run, runs = comparison.base, comparison.files
    references = (f"{file.reference.model}, {reference_in_words(file.reference)}" for file in runs if file.reference)
    shared = {
        "corpus": comparison.corpus.name if comparison.corpus else "",
        "text": run.text_identity,
        "method": run.method,
        "context length": f"{run.context_length:,} tokens",
        "stride": f"{run.stride:,} tokens",
        "windows": f"{run.num_windows:,}",
        "tokens": f"{run.num_scored:,} scored, {run.num_tokens:,} in the text",
        "reference": "; ".join(dict.fromkeys(references)),
        "answers": comparison.answers_in_words,
        "intervals": f"{comparison.blocks}; {comparison.num_resamples:,} resamples, seed {comparison.seed}",
    }
    run_values = {
        "model": [run.model for run in runs],
        "weights": [run.weights for run in runs],
        "server": [run.versions for run in runs],
        "fingerprint": [run.server.fingerprint or "" for run in runs],
        "computed by": [in_words(run.server.computed_by) for run in runs],
        "client": [run.client_version for run in runs],
        "finished": [run.finished or "" for run in runs],
        "file": [printable(run.path.name) for run in runs],
    }
    own = {name: values for name, values in run_values.items() if len(set(values)) > 1 or len(runs) == 1}
    shared |= {name: values[0] for name, values in run_values.items() if name not in own}
    sections = [
        (run.label, [(name, values[place]) for name, values in own.items() if values[place]])
        for place, run in enumerate(runs)
    ]
    return [pair for pair in shared.items() if pair[1]], sections


def _largest_kld(comparison: RunComparison) -> int | None:
    """The index of the run with the largest mean KL divergence; None if no run diverges."""
    means = [-1.0 if figures.kld is None else figures.kld.value for figures in comparison.runs]
    return int(np.argmax(means)) if max(means) > 0 else None


def _template() -> Template:
    """Load the report's template, which escapes text and raises an error for an undefined name."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters["name"] = _breakable
    return environment.get_template("report.html.j2")


def _breakable(name: str) -> Markup:
    """Allow line breaks after the hyphens of a name."""
    return escape(name).replace("-", Markup("-<wbr>"))


def _policy_hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
