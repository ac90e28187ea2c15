"""Shows accuracies on tasks as tables: for a terminal, in Markdown, as CSV, and in the report."""

from collections.abc import Iterator

from scoremode._texts import Column, aligned
from scoremode.accuracy.compare_tasks import FlippedAnswer, ModelTasks, TaskComparison
from scoremode.accuracy.flips import TaskFigures
from scoremode.accuracy.samples import Sample
from scoremode.comparison.tables import CsvRow, escaped, markdown_rows, paragraphs

_MAX_FLIPPED = 200
"""Limit on the flipped questions that a report shows per model."""
_END = 300
"""How many characters from the end of a question's prompt are shown."""


def tasks_as_text(tasks: TaskComparison, *, is_markdown: bool = False) -> str:
    """Format one table per model, and notes on the verdicts, for a terminal or in Markdown."""
    tables = [(markdown_rows if is_markdown else aligned)(_columns(tasks, model)) for model in tasks.models]
    notes = accuracy_notes(tasks)
    return paragraphs(*tables, [f"- {escaped(note)}" for note in notes] if is_markdown else notes)


def tasks_as_csv(tasks: TaskComparison) -> Iterator[CsvRow]:
    for model in tasks.models:
        for row in model.all_rows:
            figures, flips = row.figures, row.figures.flips
            low, high = figures.interval
            shared = {"run": model.label, "base": tasks.base, "task": row.task}
            yield {
                **shared,
                "figure": "accuracy_difference",
                "value": flips.difference,
                "low": low,
                "high": high,
                "verdict": figures.verdict,
            }
            values = {
                "base_accuracy": flips.base_accuracy,
                "accuracy": flips.accuracy,
                "num_questions": flips.num_questions,
                "lost": flips.lost,
                "gained": flips.gained,
                "p": figures.p,
                "smallest_difference_shown": figures.smallest_shown,
                "num_questions_needed": figures.num_needed,
            }
            for name, value in values.items():
                yield {**shared, "figure": name, "value": value}


def report_sections(tasks: TaskComparison) -> Iterator[dict[str, object]]:
    """Yield the report's sections, one per model. Flipped questions come first if both models prefer their option by
    many nats, and last if one is close to a tie. Verdicts are classes of the style sheet, one per row."""
    for model in tasks.models:
        flipped = sorted(model.flipped, key=lambda question: -min(_margin(question.base), _margin(question.other)))
        yield {
            "label": model.label,
            "columns": _columns(tasks, model),
            "verdicts": [row.figures.verdict.split()[0] for row in model.all_rows],
            "flipped": [_flipped(tasks.base, model.label, question) for question in flipped[:_MAX_FLIPPED]],
            "num_left_out": max(0, len(flipped) - _MAX_FLIPPED),
        }


def accuracy_notes(tasks: TaskComparison) -> list[str]:
    """Warnings, and an explanation of the verdicts."""
    level = f"{100 * tasks.smallest_difference:g}"
    return [
        *tasks.warnings,
        "Differences are in points, with their 95 % score interval. p is McNemar's exact test, two-sided, and "
        "for a task it is adjusted for the number of tasks (Holm).",
        "Smallest shown: the difference that this number of questions shows with 80 % power, at the observed rate of "
        f"flips. There are too few questions if it exceeds {level} {'point' if level == '1' else 'points'}.",
    ]


def _columns(tasks: TaskComparison, model: ModelTasks) -> list[Column]:
    rows = model.all_rows
    figures = [row.figures for row in rows]
    flips = [task.flips for task in figures]
    judges = [row.metric if row.filter in ("", "none") else f"{row.metric}, {row.filter}" for row in rows]
    verdicts = [task.verdict + ("" if task.num_needed is None else f": {task.num_needed:,} needed") for task in figures]
    return [
        Column("task", [row.task for row in rows], right=False),
        Column("judged by", judges, right=False),
        Column("questions", [f"{flip.num_questions:,}" for flip in flips]),
        Column(f"{tasks.base}, %", [f"{100 * flip.base_accuracy:.2f}" for flip in flips]),
        Column(f"{model.label}, %", [f"{100 * flip.accuracy:.2f}" for flip in flips]),
        Column("difference", [_difference(task) for task in figures]),
        Column("lost", [f"{flip.lost:,}" for flip in flips]),
        Column("gained", [f"{flip.gained:,}" for flip in flips]),
        Column("p", ["< 0.0001" if task.p < 1e-4 else f"{task.p:.4f}" for task in figures]),
        Column("smallest shown", [f"{100 * task.smallest_shown:.2f}" for task in figures]),
        Column("verdict", verdicts, right=False),
    ]


def _difference(figures: TaskFigures) -> str:
    low, high = figures.interval
    return f"{100 * figures.flips.difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def _margin(sample: Sample) -> float:
    """The difference in logprob of the model's two most likely options, in nats; 0 for a generated text."""
    logprobs = sorted((answer.logprob for answer in sample.answers if answer.logprob is not None), reverse=True)
    return logprobs[0] - logprobs[1] if len(logprobs) > 1 else 0.0


def _flipped(base: str, label: str, flipped: FlippedAnswer) -> tuple[str, list[tuple[str, str, str]]]:
    """Make a heading for a flipped question, and one row per option with the logprobs of the base and the model. For
    generated texts the row has both texts."""
    right, wrong = (base, label) if flipped.base.is_right else (label, base)
    prompt = flipped.base.prompt
    shown = prompt if len(prompt) <= _END else f"…{prompt[-_END:]}"
    heading = (
        f"{flipped.task} {flipped.doc_id}: {right} is right, {wrong} is not (target {flipped.base.target}). {shown}"
    )
    pairs = zip(flipped.base.answers, flipped.other.answers, strict=False)
    if any(answer.logprob is None for answer in (*flipped.base.answers, *flipped.other.answers)):
        return heading, [("answer", first.text, second.text) for first, second in pairs]
    return heading, [(first.text, f"{first.logprob:.3f}", f"{second.logprob:.3f}") for first, second in pairs]
