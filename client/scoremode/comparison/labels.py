"""What runs are called: every label is another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scoremode._printable import printable
from scoremode.comparison.run_file import RunFile, load_run
from scoremode.errors import RunError


def load_runs(paths: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[RunFile]:
    """Read several runs, and tell them apart.

    Args:
        paths: As for `load_run`.
        labels: One for each run. When left out, a run bears the model's name if no other has it, else its file's.

    Raises:
        RunError: a run cannot be read, or there is not one label for each run.
    """
    runs = [load_run(path) for path in paths]
    if labels is None:
        labels = _labels(runs)
    if len(labels) != len(runs):
        raise RunError(f"{len(labels)} labels for {len(runs)} runs")
    return [replace(run, label=printable(label)) for run, label in zip(runs, labels, strict=True)]


def _labels(runs: Sequence[RunFile]) -> list[str]:
    labels = [model_name(run.model) for run in runs]
    # Each is longer than the one before, and the last is another for every file.
    for longer in ([run.path.stem for run in runs], [str(run.path) for run in runs], _numbered(runs)):
        counts = Counter(labels)
        labels = [label if counts[label] == 1 else other for label, other in zip(labels, longer, strict=True)]
    return labels


def model_name(model: str) -> str:
    """The folder's where the model is served under its path."""
    return Path(model).name if Path(model).is_absolute() else model


def _numbered(runs: Sequence[RunFile]) -> list[str]:
    return [f"{run.path} ({number})" for number, run in enumerate(runs, 1)]
