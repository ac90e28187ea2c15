"""Reads logs of llama.cpp's `llama-perplexity` as figures, to show next to the figures of runs.

Standard errors are the log's own, and figures that a log lacks are None. A log has no values of single tokens, so rows
of logs have neither intervals nor verdicts.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode._texts import encoding_of, printable
from scoremode.comparison.compare import check_labels
from scoremode.comparison.figures import EngineLog, Figure, RunComparison, RunFigures
from scoremode.errors import RunError, file_errors

# All of these patterns take linear time in the length of a line.
_NUMBER = r"(-?(?:\d{1,20}(?:\.\d{0,20})?(?:e[+-]?\d{1,3})?|inf|nan))"
_FIGURE = re.compile(rf"{_NUMBER}(?: *(?:±|\+/-) *{_NUMBER})? ?%?")
_WINDOWS = re.compile(r"over (\d{1,9}) chunks, n_ctx=(\d{1,9})\b")
_SIZE = re.compile(r"(\d{1,9}\.\d{1,9}) (MiB|GiB) \((\d{1,9}\.\d{1,9}) BPW\)")
_FINAL, _OF_MODEL, _OF_BASE = "Final estimate: PPL", "Mean PPL(Q)", "Mean PPL(base)"
_QUANTILES = {
    "kld_median": "Median KLD",
    "kld_p95": "95.0% KLD",
    "kld_p99": "99.0% KLD",
    "kld_p999": "99.9% KLD",
    "kld_max": "Maximum KLD",
}
_PERCENTAGES = {"delta_p_rms": "RMS Δp", "same_top_p": "Same top p"}
"""`_QUANTILES` and `_PERCENTAGES` have the names of figures in a log, by the names of fields in `RunFigures`."""
_RANGES = {
    # A perplexity is at least 1, except for rounding.
    **dict.fromkeys((_FINAL, _OF_MODEL, _OF_BASE), (0.999, math.inf)),
    **dict.fromkeys(_PERCENTAGES.values(), (0, 100)),
}
"""The smallest and largest valid values, by the names of figures in a log."""

_LARGEST_DIFFERENCE = 1e-2
"""Largest accepted difference between the log's and the run's ln(perplexity) of the base model. llama.cpp raises
logprobs to at least 16 nats below the top token's, which lowers its perplexity a little."""


def load_log(path: Path, label: str) -> RunFigures[EngineLog]:
    """Read the output (stdout and stderr) of `llama-perplexity`, with or without `--kl-divergence`.
    RunError if the log cannot be read, or has no final figures."""
    with file_errors(RunError, f"read {path}"):
        text = path.read_text(encoding_of(path), errors="replace")
    lines = (line.partition(":") for line in text.split("\n"))
    values = {" ".join(name.split()): value for name, _, value in lines} | {_FINAL: _rest_of_line(text, _FINAL)}
    names = (_FINAL, _OF_MODEL, _OF_BASE, "Mean KLD", *_QUANTILES.values(), *_PERCENTAGES.values())
    printed = {name: _read_figure(path, name, value) for name in names if (value := values.get(name))}
    windows, perplexity = _WINDOWS.search(text), printed.get(_OF_MODEL) or printed.get(_FINAL)
    if windows is None or perplexity is None:
        raise RunError(f"{path} is not a log of llama-perplexity: it lacks the number of chunks or the final figures")
    size, base = _SIZE.match(_rest_of_line(text, "file size ")), printed.get(_OF_BASE)
    log = EngineLog(
        path,
        printable(label),
        base_perplexity=None if base is None else base.value,
        file_type=printable(_rest_of_line(text, "file type ")) or None,
        bits_per_weight=float(size[3]) if size else None,
        gib=float(size[1]) / (1024 if size[2] == "MiB" else 1) if size else None,
        num_windows=int(windows[1]),
        context_length=int(windows[2]),
    )
    figures: dict[str, Any] = {name: printed[label].value for name, label in _QUANTILES.items() if label in printed}
    percentages = {name: printed[label] for name, label in _PERCENTAGES.items() if label in printed}
    figures |= {name: share.mapped(lambda percent: percent / 100, 1 / 100) for name, share in percentages.items()}
    return RunFigures(
        log, perplexity.mapped(math.log, 1 / perplexity.value), perplexity, kld=printed.get("Mean KLD"), **figures
    )


def _rest_of_line(text: str, words: str) -> str:
    """The text after `words` and an equals sign, in the first line with these words; empty if no line has them."""
    return text.partition(words)[2].partition("\n")[0].strip(" =")


def _read_figure(path: Path, name: str, text: str) -> Figure:
    least, largest = _RANGES.get(name, (-math.inf, math.inf))
    match = _FIGURE.fullmatch(text.strip())
    value, stderr = (float(match[1]), float(match[2] or 0)) if match else (math.inf, -1)
    if value < least or value > largest or stderr < 0:
        raise RunError(f"{path}: {name}: {text.strip()[:40]!r} is not a number from {least:g} to {largest:g}")
    return Figure(value, stderr if match and match[2] else None, None, None)


def with_logs(comparison: RunComparison, llama_cpp: Iterable[tuple[str, str]]) -> RunComparison:
    """Add logs of llama-perplexity, given as labels and paths, to a comparison. RunError if a log cannot be
    read, has other windows than the runs or another base perplexity than their reference, or a label occurs twice."""
    logs = [load_log(Path(path), label) for label, path in llama_cpp]
    for figures in logs:
        _check(comparison, figures.run)
    extended = replace(comparison, logs=[*comparison.logs, *logs])
    check_labels([figures.run.label for figures in extended.rows])
    return extended


def _check(comparison: RunComparison, log: EngineLog) -> None:
    run = next((file for file in comparison.files if file.reference is not None), comparison.base)
    reference = run.reference
    windows = ("llama.cpp", log.num_windows, log.context_length)
    if (run.method, run.num_windows, run.context_length) != windows:
        raise RunError(
            f"{log.path} has {log.num_windows} chunks of {log.context_length} tokens, and {run.path} {run.num_windows} "
            f"windows of {run.context_length} by method {run.method}"
        )
    if log.base_perplexity is None or reference is None:
        return
    if reference.perplexity is None:
        raise RunError(f"{run.path}: reference.perplexity is null, so the base of {log.path} cannot be checked")
    # `not <=` also refuses NaN and infinity.
    if not abs(math.log(log.base_perplexity / reference.perplexity)) <= _LARGEST_DIFFERENCE:
        raise RunError(
            f"{log.path} was compared with another base than the reference {reference.name}: its perplexity is "
            f"{log.base_perplexity} instead of {reference.perplexity:.6f}"
        )
