"""Compares models by their answers to the same questions, task by task and over all tasks."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from scoremode.accuracy.flips import Flips, TaskFigures, exact_p, task_figures
from scoremode.accuracy.samples import Sample, TaskSamples
from scoremode.errors import RunError


@dataclass(frozen=True, slots=True)
class FlippedAnswer:
    """A question that only one of two models answers right."""

    task: str
    doc_id: int
    base: Sample
    other: Sample


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A model's figures on a task, compared with the base."""

    task: str
    metric: str
    filter: str
    figures: TaskFigures


@dataclass(frozen=True, slots=True)
class ModelTasks:
    """A model compared with the base on all of their tasks."""

    label: str
    rows: list[TaskRow]
    """One per task; p-values and verdicts are adjusted for the number of tasks (Holm's method)."""
    pooled: TaskRow
    """The figures on the questions of all tasks together; the verdict is the model's."""
    flipped: list[FlippedAnswer]

    @property
    def all_rows(self) -> list[TaskRow]:
        """The rows that tables show: with several tasks, the pooled one comes last."""
        return [*self.rows, self.pooled] if len(self.rows) > 1 else self.rows


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """The base, and every other model compared with it."""

    base: str
    models: list[ModelTasks]
    smallest_difference: float
    warnings: list[str]


def compare_tasks(models: Mapping[str, Mapping[str, TaskSamples]], smallest_difference: float = 0.01) -> TaskComparison:
    """Compare models with the first of them. RunError if the questions differ, or there is nothing to compare.

    Args:
        models: Answers by label and task.
        smallest_difference: The smallest difference of accuracies that matters, 0 to 1. The verdict is "too few
            questions" if no difference is shown, and there are too few questions to show one of this size.
    """
    unjudged = sorted({task for tasks in models.values() for task, samples in tasks.items() if not samples.metric})
    warnings = [f"Left out, as no metric is yes or no: {', '.join(unjudged)}."] if unjudged else []
    judged = {label: {task: tasks[task] for task in tasks if task not in unjudged} for label, tasks in models.items()}
    (base, base_tasks), *others = judged.items()
    compared = []
    for label, tasks in others:
        shared = [task for task in base_tasks if task in tasks]
        if not shared:
            own, of_base = (", ".join(names) or "none" for names in (tasks, base_tasks))
            raise RunError(". ".join([f"{label} and {base} have no task in common: {own}, and {of_base}", *warnings]))
        if missing := sorted(set(base_tasks) ^ set(tasks)):
            warnings.append(f"Left out, as {label} or {base} does not have it: {', '.join(missing)}.")
        pairs = [(base_tasks[task], tasks[task]) for task in shared]
        warnings += [warning for pair in pairs for warning in _check(label, *pair)]
        compared.append(_model(label, pairs, smallest_difference))
    return TaskComparison(base, compared, smallest_difference, list(dict.fromkeys(warnings)))


def _model(label: str, pairs: list[tuple[TaskSamples, TaskSamples]], smallest_difference: float) -> ModelTasks:
    # Imported here because this takes a second, which comparisons without tasks save.
    from statsmodels.stats.multitest import multipletests

    flips = [_flips(base, other) for base, other in pairs]
    adjusted = multipletests(list(map(exact_p, flips)), method="holm")[1].tolist()
    rows = [
        TaskRow(base.task, base.metric, base.filter, task_figures(task_flips, smallest_difference, p))
        for (base, _), task_flips, p in zip(pairs, flips, adjusted, strict=True)
    ]
    total = Flips(*map(sum, zip(*map(astuple, flips), strict=True)))
    flipped = [
        FlippedAnswer(base.task, doc_id, sample, other.samples[doc_id])
        for base, other in pairs
        for doc_id, sample in base.samples.items()
        if sample.is_right != other.samples[doc_id].is_right
    ]
    return ModelTasks(label, rows, TaskRow("all tasks", "", "", task_figures(total, smallest_difference)), flipped)


def _flips(base: TaskSamples, other: TaskSamples) -> Flips:
    pairs = [(sample.is_right, other.samples[doc_id].is_right) for doc_id, sample in base.samples.items()]
    return Flips(len(pairs), sum(first for first, _ in pairs), pairs.count((True, False)), pairs.count((False, True)))


def _check(label: str, base: TaskSamples, other: TaskSamples) -> list[str]:
    """Raise RunError unless both models have the same questions and metric. Return a warning if prompts differ."""
    place = f"{other.path}: task {base.task}"
    if (base.metric, base.filter) != (other.metric, other.filter):
        raise RunError(
            f"{place} is judged by {other.metric} with filter {other.filter}, in {base.path} by {base.metric} with "
            f"{base.filter}: choose with --task-metric and --task-filter"
        )
    if base.samples.keys() != other.samples.keys():
        raise RunError(
            f"{place} has {len(other.samples):,} questions, {base.path} has {len(base.samples):,}, "
            f"{len(base.samples.keys() & other.samples.keys()):,} of them the same: use one --limit for all models"
        )
    pairs = [(sample, other.samples[doc_id]) for doc_id, sample in base.samples.items()]
    if num_others := sum((a.doc_hash, a.target_hash) != (b.doc_hash, b.target_hash) for a, b in pairs):
        raise RunError(f"{place} has {num_others:,} questions or targets that differ from those in {base.path}")
    if num_others := sum(a.prompt_hash != b.prompt_hash for a, b in pairs):
        differ = "prompt differs" if num_others == 1 else "prompts differ"
        return [f"{base.task}: {num_others:,} {differ} between {label} and the base (examples, chat template?)."]
    return []
