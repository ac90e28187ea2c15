"""A comparison as one HTML file that loads nothing from outside, opens from disk, and prints."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from scoremode._texts import printable
from scoremode.accuracy.compare_tasks import TaskComparison
from scoremode.comparison.accuracy_tables import accuracy_notes, report_sections
from scoremode.comparison.agreement import has_answers
from scoremode.comparison.card import card
from scoremode.comparison.figures import RunComparison
from scoremode.comparison.plot_style import LIGHT, as_element
from scoremode.comparison.plots import common_caption, measurement_in_words, plots
from scoremode.comparison.report_data import script_json, text_data
from scoremode.comparison.report_tables import effect_cells, pair_matrices, parted_answers, run_table
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.summary import computed_differently, in_words, summary
from scoremode.comparison.tables import Column, best_at_each_size, group_notes, group_tables
from scoremode.runs import weights_in_words, write_whole

TEMPLATES = Path(__file__).with_name("templates")
MAX_BYTES = 30_000_000
"""Of the file: what a browser opens in a moment, and a mail may carry."""
_MAX_NAMED = 8
"""Runs in the title."""


def write_report(
    comparison: RunComparison, path: str | Path, *, max_bytes: int = MAX_BYTES, tasks: TaskComparison | None = None
) -> None:
    """Write the report. OSError or OutputError if the file cannot be written.

    Args:
        comparison: The runs and their figures.
        path: Of the HTML file.
        tasks: Accuracies on tasks, to be shown as well.
        max_bytes: The file's largest size: it keeps the text of as many of the most divergent passages as fit.
            Tables, plots and means of all passages are always there.
    """
    context = _context(comparison) | {
        "accuracies": [] if tasks is None else [*report_sections(tasks)],
        "accuracy_notes": [] if tasks is None else accuracy_notes(tasks),
        "base_of_tasks": "" if tasks is None else tasks.base,
    }
    template = template_of("report.html.j2")
    without_text = template.render(**context, data="", text_note="")
    data = text_data(comparison.files, max_bytes - len(without_text.encode()) - 1000)
    data["largest_kld"] = _largest_kld(comparison)
    text_note, num_kept, num_tokens = "Values are rounded to 16 bits.", data["num_kept"], comparison.base.num_scored
    if num_kept < num_tokens:
        part = f"The text of {num_kept:,} of {num_tokens:,} tokens is here, that of the passages that diverge most"
        text_note = f"{part}; others have their mean. {text_note}"
    html = template.render(**context, data=Markup(script_json(data)), text_note=text_note)
    write_whole(Path(path), html.encode())


def _context(comparison: RunComparison) -> dict[str, Any]:
    names = ("report.css", "report.js", "report_actions.js")
    style, *scripts = ((TEMPLATES / name).read_text("utf-8") for name in names)
    script = "".join(scripts)
    columns, rows = run_table(comparison)
    runs = comparison.files
    more = [f"{len(runs) - _MAX_NAMED} more"] if len(runs) > _MAX_NAMED else []
    warnings = computed_differently(runs)
    settings = ["--resamples", str(comparison.num_resamples), "--seed", str(comparison.seed)]
    return {
        "comparison": comparison,
        "title": ", ".join([*(run.label for run in runs[:_MAX_NAMED]), *more]),
        "measured": measurement_in_words(comparison),
        "style": Markup(style),
        "style_hash": policy_hash(style),
        "script": Markup(script),
        "script_hash": policy_hash(script),
        "sentences": [sentence for sentence in summary(comparison) if sentence not in warnings],
        "columns": columns,
        "rows": rows,
        "best": best_at_each_size(comparison),
        "card": card(comparison),
        "effects": [*effect_cells(comparison)],
        "warnings": warnings,
        "base": comparison.base.label,
        "matrices": pair_matrices(comparison),
        "groups": [section for sections in group_tables(comparison) for section in sections],
        "group_notes": group_notes(comparison),
        "answers": [
            (run.label, parted)
            for run in runs
            if has_answers(run, are_greedy=True) and (parted := parted_answers(run))[0].cells
        ],
        "has_kld": _largest_kld(comparison) is not None,
        "plots": [(plot, Markup(as_element(plot.draw(LIGHT), plot.name, plot.subject))) for plot in plots(comparison)],
        "plots_caption": common_caption(comparison),
        "references": dict.fromkeys(
            f"{run.reference.name}: {run.reference.model}, {weights_in_words(run.reference)}"
            for run in runs
            if run.reference is not None
        ),
        "run_settings": _run_settings(runs),
        # In the folder of the runs.
        "command": comparison.command(*settings, "--html", "report.html"),
    }


def _run_settings(runs: Sequence[RunFile]) -> list[Column]:
    cells = {
        "run": [run.label for run in runs],
        "model": [run.model for run in runs],
        "weights": [run.weights for run in runs],
        "server": [run.versions for run in runs],
        "fingerprint": [run.server.fingerprint or "-" for run in runs],
        "computed by": [in_words(run.server.computed_by) or "-" for run in runs],
        "client": [run.client_version for run in runs],
        "finished": [run.finished or "-" for run in runs],
        "file": [printable(run.path.name) for run in runs],
    }
    return [Column(name, values, right=False) for name, values in cells.items()]


def _largest_kld(comparison: RunComparison) -> int | None:
    """The place of the run with the largest mean KL divergence."""
    means = [-1.0 if figures.kld is None else figures.kld.value for figures in comparison.runs]
    return int(np.argmax(means)) if max(means) >= 0 else None


def template_of(name: str) -> Template:
    """A template of an HTML file: text is escaped, and a name that is not given is an error."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(name)


def policy_hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
