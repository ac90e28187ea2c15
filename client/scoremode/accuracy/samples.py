"""Reads lm-eval's `--log_samples` files: for each question, the answer and whether it is right.

All backends of lm-eval write them, as `samples_TASK_DATE.jsonl` below the folder of `--output_path`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode._texts import printable
from scoremode.errors import CorpusError, RunError
from scoremode.runs import read_file

_FILE_NAME = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
_RIGHT = {"1": True, "1.0": True, "True": True, "0": False, "0.0": False, "False": False}


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """A model's answer to a question: an option with its logprob, or a generated text."""

    text: str
    logprob: float | None
    """Logprob of the whole option in nats; None for a generated text."""


@dataclass(frozen=True, slots=True)
class Sample:
    doc_hash: str
    prompt_hash: str
    target_hash: str
    prompt: str
    target: str
    answers: tuple[SampleAnswer, ...]
    is_right: bool


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """A model's answers to a task's questions."""

    task: str
    metric: str
    """The metric that judges answers; empty if no metric of the task is yes or no, and then `samples` is empty too."""
    filter: str
    path: Path
    samples: dict[int, Sample]
    """Keyed by lm-eval's `doc_id`."""


def load_tasks(folder: Path, metrics: Sequence[str] = (), filters: Sequence[str] = ()) -> dict[str, TaskSamples]:
    """Read the latest samples of every task below a folder. RunError if there are none, a file is not lm-eval's, or it
    is ambiguous which metric or filter to use.

    Args:
        folder: The folder of `--output_path`, or one in it.
        metrics: The first of these that a task has judges its answers; if empty, the task's only yes-or-no metric.
        filters: lm-eval's filters, chosen in the same way.
    """
    latest: dict[str, tuple[str, Path]] = {}
    for path in folder.rglob("samples_*.jsonl"):
        if match := _FILE_NAME.fullmatch(path.name):
            task, date = printable(match[1]), match[2]
            latest[task] = max(latest.get(task, ("", path)), (date, path))
    if not latest:
        raise RunError(
            f"--tasks: {folder} has no samples_TASK_DATE.jsonl below it; run lm-eval with --log_samples --output_path"
        )
    return {task: _load_task(task, path, metrics, filters) for task, (_, path) in sorted(latest.items())}


def _load_task(task: str, path: Path, metrics: Sequence[str], filters: Sequence[str]) -> TaskSamples:
    try:
        records = [record for _, record in read_file(path, [])]
    except CorpusError as error:
        raise RunError(str(error)) from error
    if not records:
        raise RunError(f"{path}: no questions")
    offered = dict.fromkeys(str(record.get("filter")) for record in records)
    chosen = _choice(path, task, "filter", list(offered), filters)
    records = [record for record in records if str(record.get("filter")) == chosen]
    metric_names = records[0].get("metrics")
    names = [name for name in metric_names if isinstance(name, str)] if isinstance(metric_names, list) else []
    yes_or_no = [name for name in names if all(str(record.get(name)) in _RIGHT for record in records)]
    if not yes_or_no:
        return TaskSamples(task, "", chosen, path, {})
    metric = _choice(path, task, "metric", yes_or_no, metrics)
    samples: dict[int, Sample] = {}
    for record in records:
        try:
            if samples.setdefault(int(record["doc_id"]), sample := _sample(record, metric)) is not sample:
                raise RunError(f"{path}: question {record['doc_id']} occurs twice; repeats cannot be compared")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise RunError(f"{path}: a line is not what lm-eval writes with --log_samples: {error!r}") from error
    return TaskSamples(task, printable(metric), printable(chosen), path, samples)


def _choice(path: Path, task: str, kind: str, offered: Sequence[str], wanted: Sequence[str]) -> str:
    chosen = [name for name in wanted if name in offered] if wanted else offered
    if not chosen or (not wanted and len(chosen) > 1):
        raise RunError(f"{path}: task {task} has {', '.join(offered)}: choose with --task-{kind}")
    return chosen[0]


def _sample(record: Mapping[str, Any], metric: str) -> Sample:
    arguments = list(record["arguments"].values())
    return Sample(
        doc_hash=str(record["doc_hash"]),
        prompt_hash=str(record["prompt_hash"]),
        target_hash=str(record["target_hash"]),
        prompt=printable(str(arguments[0]["arg_0"])),
        target=printable(str(record["target"])),
        answers=tuple(map(_answer, arguments, record["filtered_resps"])),
        is_right=_RIGHT[str(record[metric])],
    )


def _answer(option: dict[str, Any], answer: object) -> SampleAnswer:
    """Read one answer: [logprob, is_greedy] for an option, both as strings; a string for a generated text."""
    if isinstance(answer, list):
        return SampleAnswer(printable(str(option["arg_1"])), float(answer[0]))
    return SampleAnswer(printable(str(answer)), None)
