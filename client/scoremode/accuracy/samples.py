"""lm-eval's `--log_samples` files, read back: for each question, the answer and whether it was right.

They are what any of its backends writes: `samples_TASK_DATE.jsonl`, below the folder that `--output_path` named.
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
    """An option with its logprob, or a text that was generated."""

    text: str
    logprob: float | None
    """Nats, of the whole option; None for a generated text."""


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
    """Empty for a task without one that is yes or no, which has no samples then."""
    filter: str
    path: Path
    samples: dict[int, Sample]
    """By lm-eval's `doc_id`."""


def load_tasks(folder: Path, metrics: Sequence[str] = (), filters: Sequence[str] = ()) -> dict[str, TaskSamples]:
    """The latest samples of every task below a folder. RunError if there are none, a file is not lm-eval's, or the
    metric or filter is not clear.

    Args:
        folder: What `--output_path` named, or a folder in it.
        metrics: The first of these that a task has is used. With none, the only one that is yes or no.
        filters: Likewise, of lm-eval's filters.
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
    named = records[0].get("metrics")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    yes_or_no = [name for name in names if all(str(record.get(name)) in _RIGHT for record in records)]
    if not yes_or_no:
        return TaskSamples(task, "", chosen, path, {})
    metric = _choice(path, task, "metric", yes_or_no, metrics)
    samples: dict[int, Sample] = {}
    for record in records:
        try:
            if samples.setdefault(int(record["doc_id"]), sample := _sample(record, metric)) is not sample:
                raise RunError(f"{path}: question {record['doc_id']} is there twice; repeats cannot be compared")
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
    """Options have [logprob, is_greedy] as strings, generated texts are strings."""
    if isinstance(answer, list):
        return SampleAnswer(printable(str(option["arg_1"])), float(answer[0]))
    return SampleAnswer(printable(str(answer)), None)
