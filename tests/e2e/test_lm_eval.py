"""lm-eval, as it is, against our server: the numbers of its own `hf` backend in float32, request by request.

lm-eval's API backends cut rolling windows two tokens shorter than its `hf` backend, so they get two tokens more.
Tolerance a request: 1e-3 nats, over up to some thousands of tokens whose float32 errors are below 1e-4 each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import lm_eval_tasks
from tests.shared_servers import API_KEY

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
    tasks: Path,
    model: str,
    arguments: dict[str, Any],
    names: tuple[str, ...] = (TASK, ROLLING),
    limit: int | None = None,
) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(names),
        limit=limit or NUM_QUESTIONS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        random_seed=None,
    )
    return results


@pytest.fixture(scope="module")
def reference(tasks: Path, random_model: Path) -> dict[str, Any]:
    """lm-eval's `hf` backend: transformers in float32."""
    arguments = {"pretrained": str(random_model), "dtype": "float32", "device": "cpu", "max_length": MAX_LENGTH}
    return evaluate(tasks, "hf", {**arguments, "batch_size": 1})


@pytest.fixture(scope="module")
def ours(tasks: Path, server: str) -> dict[str, Any]:
    """lm-eval's `local-completions` backend on our server, tokenizing remotely."""
    arguments = {
        "model": "tiny",
        "base_url": f"{server}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
        "batch_size": 2,
        "max_length": MAX_LENGTH + 2,
    }
    return evaluate(tasks, "local-completions", arguments)


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """What the backend returned for each request, in the order of the documents."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def test_every_option_has_the_loglikelihood_of_the_hf_backend(ours: dict[str, Any], reference: dict[str, Any]):
    got, expected = answers(ours, TASK), answers(reference, TASK)
    assert len(got) == len(expected) == 4 * NUM_QUESTIONS
    for (loglikelihood, is_greedy), (expected_loglikelihood, expected_is_greedy) in zip(got, expected, strict=True):
        assert loglikelihood == pytest.approx(expected_loglikelihood, abs=1e-3)
        assert is_greedy == expected_is_greedy


def test_every_document_has_the_loglikelihood_of_the_hf_backend(ours: dict[str, Any], reference: dict[str, Any]):
    got, expected = answers(ours, ROLLING), answers(reference, ROLLING)
    assert len(got) == 3
    assert got == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("task", [TASK, ROLLING])
def test_metrics_agree_to_four_digits(ours: dict[str, Any], reference: dict[str, Any], task: str):
    names = [name for name, value in reference["results"][task].items() if isinstance(value, float)]
    assert names
    for name in names:
        assert ours["results"][task][name] == pytest.approx(reference["results"][task][name], rel=5e-5), name


def test_a_generation_task_runs(tmp_path: Path, server: str):
    lm_eval_tasks.write_jsonl(tmp_path / "facts.jsonl", [{"question": "2 + 2 =", "answer": "4"}] * 3)
    (tmp_path / "facts.yaml").write_text(
        "task: facts\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {json.dumps(str(tmp_path / 'facts.jsonl'))}}}}}\n"
        "output_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: answer\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 5}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    arguments = {"model": "tiny", "base_url": f"{server}/v1/completions", "tokenizer_backend": "remote"}
    results = evaluate(tmp_path, "local-completions", arguments, ("facts",))
    texts = [sample["resps"][0][0] for sample in results["samples"]["facts"]]
    assert len(texts) == 3
    assert all(texts[0] == text for text in texts)
    assert texts[0].strip()


def test_an_api_key_is_taken_by_both_of_its_parts(tasks: Path, plugin_server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    arguments = {
        "model": "random",
        "base_url": f"{plugin_server}/v1/completions",
        "tokenizer_backend": "remote",
        "auth_token": API_KEY,
        "max_length": 128,
    }
    results = evaluate(tasks, "local-completions", arguments, (TASK,), limit=2)
    assert all(loglikelihood < 0 for loglikelihood, _ in answers(results, TASK))
