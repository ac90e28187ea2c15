"""Which runs can be compared, as those that give a value to the same tokens after the same text; and their labels."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scoremode._printable import printable
from scoremode.comparison.run_file import RunFile, load_run
from scoremode.errors import RunError


def check_comparable(runs: Sequence[RunFile]) -> None:
    """Refuse runs that cannot be paired token by token.

    Raises:
        RunError: the list is empty, two runs have one label, or one differs from the first in text, tokens or windows.
    """
    if not runs:
        raise RunError("give at least one run to compare")
    labels = [run.label for run in runs]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise RunError(f"{labels.count(repeated[0])} runs are called {repeated[0]!r}: give them labels of their own")
    for run in runs[1:]:
        if difference := _difference(runs[0], run):
            raise RunError(f"{runs[0].path} and {run.path} cannot be compared: {difference}")


def _difference(first: RunFile, second: RunFile) -> str | None:
    """The first thing that differs, in words."""
    settings: list[tuple[str, object, object]] = [
        ("method", first.method, second.method),
        ("context length", first.context_length, second.context_length),
        ("stride", first.stride, second.stride),
        ("number of windows", first.num_windows, second.num_windows),
        ("number of scored tokens", first.num_scored, second.num_scored),
    ]
    if first.kind == second.kind:
        # A run against a reference knows its text by other marks than one of perplexity.
        settings.insert(0, ("text (its fingerprint)", first.text_identity, second.text_identity))
    for name, one, other in settings:
        if one != other:
            return f"the {name} is {one} in the first and {other} in the second"
    if not np.array_equal(first.window_sizes, second.window_sizes):
        return "their windows have different numbers of tokens"
    return _token_difference(first, second)


def _token_difference(first: RunFile, second: RunFile) -> str | None:
    differing = np.flatnonzero(first.token_ids != second.token_ids)
    if not len(differing):
        return None
    at = int(differing[0])
    window = int(np.searchsorted(np.cumsum(first.window_sizes), at, side="right"))
    return (
        f"{len(differing):,} of {first.num_scored:,} token ids differ, the first in window {window}: "
        f"{first.token_ids[at]} and {second.token_ids[at]}; the text or the tokenizer is another"
    )


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
    numbered = [f"{run.path} ({number})" for number, run in enumerate(runs, 1)]
    # Each is longer than the one before, and the last is another for every file.
    for longer in ([run.path.stem for run in runs], [str(run.path) for run in runs], numbered):
        counts = Counter(labels)
        labels = [label if counts[label] == 1 else other for label, other in zip(labels, longer, strict=True)]
    return labels


def compare_command(runs: Sequence[RunFile], files: Sequence[str], *options: str) -> str:
    """The command that compares the runs in these files again. Labels with a comma are left to be chosen."""
    labels = [] if any("," in run.label for run in runs) else ["--labels", ",".join(run.label for run in runs)]
    return printable(shlex.join(["ppl-client", "compare", *files, *labels, *options]))


def model_name(model: str) -> str:
    """The folder's where the model is served under its path."""
    return Path(model).name if Path(model).is_absolute() else model
