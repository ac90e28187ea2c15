"""lm-eval against our server, with its own `local-completions` backend and with ours: the numbers of its `hf` backend,
request by request, in float32.

lm-eval's API backends cut rolling windows two tokens shorter than its `hf` backend, so they get two tokens more.
Tolerance a request: 1e-3 nats, over up to some thousands of tokens whose float32 errors are below 1e-4 each.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import lm_eval_tasks
from scoremode.accuracy.compare_tasks import compare_tasks
from scoremode.accuracy.flips import Flips
from scoremode.accuracy.samples import load_tasks

MAX_LENGTH = 512
TASK, ROLLING = "python_reference", "python_documents"
NUM_QUESTIONS = 8


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OPENAI_API_KEY", "unused")
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, wikitext: str) -> Path:
    """The multiple-choice task, and a rolling one over documents of some windows and of less than one."""
    folder = tmp_path_factory.mktemp("tasks")
    lm_eval_tasks.write_tasks(folder, None)
    pages = [wikitext[:6000], wikitext[6000:6800], "x"]
    lm_eval_tasks.write_jsonl(folder / "wikitext_documents.jsonl", [{"page": page} for page in pages])
    rolling = lm_eval_tasks.ROLLING.format(folder=folder).replace("task: wikitext_documents", f"task: {ROLLING}")
    (folder / f"{ROLLING}.yaml").write_text(rolling)
    return folder


def evaluate(
    tasks: Path, model: Any, arguments: dict[str, Any], *names: str, limit: int = NUM_QUESTIONS
) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(names),
        limit=limit,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        random_seed=None,
    )
    return results


@pytest.fixture(scope="module")
def reference(tasks: Path, random_model: Path) -> dict[str, Any]:
    """lm-eval's `hf` backend: transformers in float32."""
    arguments = {"pretrained": str(random_model), "dtype": "float32", "device": "cpu", "max_length": MAX_LENGTH}
    return evaluate(tasks, "hf", {**arguments, "batch_size": 1}, TASK, ROLLING)


@pytest.fixture(scope="module", params=["scoremode", "local-completions"])
def ours(request: pytest.FixtureRequest, tasks: Path, server: str, random_model: Path) -> dict[str, Any]:
    """Our backend, and lm-eval's `local-completions`, which tokenizes remotely."""
    if request.param == "scoremode":
        from scoremode.lm_eval.model import ScoremodeLM

        model = ScoremodeLM(server, tokenizer=str(random_model), max_length=MAX_LENGTH, num_concurrent=4)
        return evaluate(tasks, model, {}, TASK, ROLLING)
    arguments = {
        "model": "tiny",
        "base_url": f"{server}/v1/completions",
        "tokenizer_backend": "remote",
        # Otherwise lm-eval takes EOS, because BOS is token 0.
        "custom_prefix_token_id": 0,
        "num_concurrent": 4,
        "batch_size": 2,
        "max_length": MAX_LENGTH + 2,
    }
    return evaluate(tasks, "local-completions", arguments, TASK, ROLLING)


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """What the backend returned for each request, in the order of the documents."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def test_every_loglikelihood_is_that_of_the_hf_backend(ours, reference):
    got, expected = answers(ours, TASK), answers(reference, TASK)
    assert len(got) == len(expected) == 4 * NUM_QUESTIONS
    assert [loglikelihood for loglikelihood, _ in got] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in expected]
    documents = answers(ours, ROLLING)
    assert len(documents) == 3
    assert documents == pytest.approx(answers(reference, ROLLING), abs=1e-3)


def test_answers_of_both_backends_are_compared_question_by_question(ours, reference, tmp_path):
    from lm_eval.loggers import EvaluationTracker

    for name, results in (("hf", reference), ("ours", ours)):
        tracker = EvaluationTracker(output_path=str(tmp_path / name))
        tracker.general_config_tracker.model_name_sanitized = "a__model"
        tracker.date_id = "2026-11-24T10-00-00.000001"
        # It changes what it writes.
        tracker.save_results_samples(TASK, deepcopy(results["samples"][TASK]))
    comparison = compare_tasks({name: load_tasks(tmp_path / name, ["acc_norm"]) for name in ("hf", "ours")})
    [row] = comparison.models[0].rows
    num_right = reference["results"][TASK]["acc_norm,none"] * NUM_QUESTIONS
    assert (comparison.warnings, row.figures.flips) == ([], Flips(NUM_QUESTIONS, round(num_right), 0, 0))
    assert row.figures.verdict == "too few questions"
