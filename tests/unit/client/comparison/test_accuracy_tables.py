"""Samples of lm-eval, read and compared question by question."""

import csv
import io
import json
from pathlib import Path

import pytest
from run_files import made_up_nlls, perplexity_run

from scoremode.accuracy.compare_tasks import compare_tasks
from scoremode.accuracy.samples import SampleAnswer, load_tasks
from scoremode.cli.main import main
from scoremode.comparison.accuracy_tables import report_sections
from scoremode.errors import RunError


def line(doc_id: int, right: object, **changes: object) -> dict[str, object]:
    """As lm-eval writes a question with two options."""
    options = {f"gen_args_{at}": {"arg_0": f"Question {doc_id}\nAnswer:", "arg_1": f" {at}"} for at in range(2)}
    return {
        "doc_id": doc_id,
        "target": "0",
        "arguments": options,
        "filtered_resps": [["-1.25", "True"], ["-2.5", "False"]],
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "doc_hash": f"doc {doc_id}",
        "prompt_hash": f"prompt {doc_id}",
        "target_hash": "0",
        "acc": right,
        "acc_norm": 1.0,
        **changes,
    }


def write(folder: Path, task: str, lines: list[object], date: str = "2026-11-24T10-00-00.000001") -> Path:
    """A task's samples where lm-eval writes them."""
    path = folder / "a__model" / f"samples_{task}_{date}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return folder


def test_answers_are_compared_question_by_question(tmp_path):
    base = [1, 1.0, True, "True", 0, 0.0, False, "False"]
    other = [0, 1, 1, 1, 1, 0, 0, 0]
    for name, answers in (("base", base), ("int4", other)):
        for task in ("arc", "mmlu_law"):
            write(tmp_path / name, task, [line(at, right) for at, right in enumerate(answers)])
    # An earlier run of the same task, of which nothing is used.
    write(tmp_path / "base", "arc", [line(0, 0)], "2026-11-23T10-00-00.000001")
    comparison = compare_tasks({name: load_tasks(tmp_path / name, ["exact_match", "acc"]) for name in ("base", "int4")})
    [model] = comparison.models
    assert (comparison.base, model.label, comparison.warnings) == ("base", "int4", [])
    flips = model.rows[0].figures.flips
    assert (flips.num_questions, flips.num_right, flips.lost, flips.gained) == (8, 4, 1, 1)
    assert (model.pooled.figures.flips.num_questions, model.pooled.figures.flips.lost) == (16, 2)
    assert [(each.doc_id, each.base.is_right) for each in model.flipped[:2]] == [(0, True), (4, False)]
    assert model.flipped[0].other.answers == (SampleAnswer(" 0", -1.25), SampleAnswer(" 1", -2.5))


def test_generated_answers_are_texts_by_the_chosen_filter(tmp_path):
    answers = [("strict-match", "[invalid]", 0.0), ("flexible-extract", "42", 1.0)]
    lines = [
        line(0, None, filter=name, filtered_resps=[text], metrics=["exact_match"], exact_match=right)
        for name, text, right in answers
    ]
    folder = write(tmp_path, "gsm8k", lines)
    with pytest.raises(RunError, match="task gsm8k has strict-match, flexible-extract: choose with --task-filter"):
        load_tasks(folder)
    sample = load_tasks(folder, filters=["flexible-extract"])["gsm8k"].samples[0]
    assert (sample.is_right, sample.answers) == (True, (SampleAnswer("42", None),))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0, 1)], "task t has acc, acc_norm: choose with --task-metric"),
        ([line(0, 1, metrics=["acc"]), line(0, 1, metrics=["acc"])], "question 0 occurs twice"),
        ([["a"]], "line 1 is not a JSON object"),
        ([], "no questions"),
        ([line(0, 1, metrics=["acc"], arguments={})], "not what lm-eval writes with --log_samples"),
    ],
)
def test_files_that_lm_eval_does_not_write_are_refused_in_one_line(tmp_path, lines, message):
    with pytest.raises(RunError, match=message) as raised:
        load_tasks(write(tmp_path, "t", lines))
    assert "\n" not in str(raised.value)


def compare_changed(folder: Path, **changes: object) -> list[str]:
    """Warnings of a comparison in which the second model's second question is changed."""
    for name, second in (("base", {}), ("q", changes)):
        write(folder / name, "t", [line(0, 1), line(**{"doc_id": 1, "right": 1, **second})])
    write(folder / "base", "another", [line(0, 1)])
    return compare_tasks({name: load_tasks(folder / name, ["acc"]) for name in ("base", "q")}).warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"doc_id": 2}, r"has 2 questions, .* has 2, 1 of them the same: use one --limit"),
        ({"target_hash": "1"}, "has 1 questions or targets that differ"),
    ],
)
def test_other_questions_are_refused_and_other_prompts_are_a_warning(tmp_path, change, message):
    with pytest.raises(RunError, match=message):
        compare_changed(tmp_path, **change)
    assert compare_changed(tmp_path, prompt_hash="other") == [
        "Left out, as q or base does not have it: another.",
        "t: 1 prompt differs between q and the base (examples, chat template?).",
    ]


def test_a_task_that_is_not_right_or_wrong_is_left_out(folders, capsys):
    """truthfulqa_mc2 has the share of its right options."""
    for folder in folders:
        write(Path(folder), "truthfulqa_mc2", [line(at, 0.25, metrics=["acc"]) for at in range(3)])
    assert main(["compare", "--tasks", f"base={folders[0]}", f"q={folders[1]}", "--task-metric", "acc"]) == 0
    printed = capsys.readouterr().out
    assert "Left out, as no metric is yes or no: truthfulqa_mc2." in printed
    assert "\nall tasks " in printed
    for path in Path(folders[1]).rglob("*"):
        if path.is_file() and "truthfulqa" not in path.name:
            path.unlink()
    assert main(["compare", "--tasks", f"base={folders[0]}", f"q={folders[1]}", "--task-metric", "acc"]) == 1
    assert "no task in common: none, and arc, a|task. Left out, as no metric is yes or no" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path):
    """Two tasks of 100 questions: of one, the second model loses 20 answers."""
    for name, lost in (("base", 0), ("q", 20)):
        for task in ("arc", "a|task"):
            write(tmp_path / name, task, [line(at, at >= lost or task == "arc") for at in range(100)])
    return [str(tmp_path / "base"), str(tmp_path / "q")]


def test_tables_have_each_task_and_all(folders, capsys):
    command = ["compare", "--tasks", f"base={folders[0]}", f"4-bit={folders[1]}", "--task-metric", "acc"]
    assert main(command) == 0
    _, arc, of_task, pooled = ([*map(str.strip, row.split("  "))] for row in capsys.readouterr().out.splitlines()[:4])
    assert [of_task[-1], pooled[-1]] == ["worse", "worse"]
    assert arc[-1] == "too few questions: 790 needed"
    assert {"-20.00 [-28.88, -13.34]", "-10.00 [-14.94, -6.57]"} <= {*of_task, *pooled}
    assert main([*command, "--csv"]) == 0
    rows = {(row["task"], row["figure"]): row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert float(rows["a|task", "accuracy_difference"]["value"]) == -0.2
    assert (rows["arc", "num_questions_needed"]["value"], rows["a|task", "lost"]["value"]) == ("790", "20")


def test_no_terminal_obeys_the_names_of_tasks_metrics_and_filters(tmp_path, capsys):
    names = {"metrics": ["a\x1b[2Jc"], "a\x1b[2Jc": 1, "filter": "f\x1b[2J"}
    folders = [write(tmp_path / label, "t\x1b[2J", [line(0, 1, **names)]) for label in ("base", "q\x1b[2J")]
    named = [f"{folder.name}={folder}" for folder in folders]
    for form in ((), ("--csv",)):
        assert main(["compare", "--tasks", *named, *form]) == 0
        shown = capsys.readouterr().out
        assert "x1b" in shown
        assert shown.replace("\n", "").isprintable()


def test_a_generated_answer_next_to_an_option_is_shown_as_a_text(tmp_path):
    other = {"filtered_resps": ["42", "43"]}
    folders = [
        write(tmp_path / name, "t", [line(0, right, **changes)])
        for name, right, changes in (("base", 1, {}), ("q", 0, other))
    ]
    tasks = compare_tasks({folder.name: load_tasks(folder, ["acc"]) for folder in folders})
    assert next(report_sections(tasks))["flipped"][0][1] == [("answer", " 0", "42"), ("answer", " 1", "43")]


def test_a_report_shows_the_questions_that_flipped(folders, tmp_path, capsys):
    runs = [str(perplexity_run(tmp_path, name, made_up_nlls(seed)).path) for seed, name in enumerate(("one", "two"))]
    command = ["compare", *runs, "--labels", "one,two", "--resamples", "100", "--html", str(tmp_path / "report.html")]
    command += ["--write-card", str(tmp_path / "card.md")]
    assert main([*command, "--tasks", *folders, "--task-metric", "acc"]) == 0
    assert "two, %" in capsys.readouterr().out
    assert "| all tasks |  | 200 | 100.00 | 90.00 | -10.00" in (tmp_path / "card.md").read_text()
    text = (tmp_path / "report.html").read_text()
    assert text.count("a|task 7: one is right, two is not (target 0). Question 7\\nAnswer:") == 1
