"""lm-eval against our server, with its own `local-completions` backend and with `python -m scoremode.lm_eval`: the
numbers of its `hf` backend, request by request, in float32, also after a kill.

Tolerance a request: 1e-3 nats, over up to some thousands of tokens whose float32 errors are below 1e-4 each.
"""

import json
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

import lm_eval_tasks
from scoremode.accuracy import compare_tasks, load_tasks
from scoremode.accuracy.flips import Flips
from tests.doc_examples import ROOT
from tests.shared_servers import API_KEY
from tests.unit.client.fake_server import serve

TASK, ROLLING = "python_reference", "python_documents"
NUM_QUESTIONS = 8
DOCUMENTED = re.findall(r"--model (\S+)[^`]*?--model_args (\S+)", (ROOT / "docs" / "lm-eval.md").read_text())
"""The backend of each command on that page, and its arguments."""
DOCUMENTED_LENGTH = 2048


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
    lm_eval_tasks.write_task(folder)
    pages = [wikitext[:6000], wikitext[6000:6800], "x"]
    lm_eval_tasks.write_jsonl(folder / "pages.jsonl", [{"page": page} for page in pages])
    rolling = {
        "task": ROLLING,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "pages.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "page",
        "metric_list": [{"metric": "word_perplexity"}],
        "metadata": {"version": 1.0},
    }
    # JSON is YAML.
    (folder / f"{ROLLING}.yaml").write_text(json.dumps(rolling))
    return folder


def evaluate(tasks: Path, model: Any, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run both tasks with lm-eval, and return its results."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[TASK, ROLLING],
        limit=NUM_QUESTIONS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        random_seed=None,
        **options,
    )


@pytest.fixture(scope="module")
def reference(tasks: Path, llama_2_model: Path) -> dict[str, Any]:
    """The results of lm-eval's `hf` backend: transformers in float32."""
    arguments = {
        "pretrained": str(llama_2_model),
        "dtype": "float32",
        "device": "cpu",
        "max_length": DOCUMENTED_LENGTH,
        "batch_size": 1,
    }
    return evaluate(tasks, "hf", arguments)


@pytest.fixture(scope="module", params=DOCUMENTED, ids=[backend for backend, _ in DOCUMENTED])
def ours(request: pytest.FixtureRequest, tasks: Path, llama_2_server: str, llama_2_model: Path) -> dict[str, Any]:
    """The results of a command of the page, on a server with its `--max-model-len`, whose tokenizer adds BOS."""
    from lm_eval.utils import simple_parse_args_string

    from scoremode.lm_eval.model import ScoremodeLM

    backend, arguments = request.param
    given = simple_parse_args_string(arguments.replace("http://localhost:8000", llama_2_server))
    if backend == "scoremode":
        return evaluate(tasks, ScoremodeLM(**given, max_length=DOCUMENTED_LENGTH), {})
    return evaluate(tasks, backend, given | {"model": "llama-2", "tokenizer": str(llama_2_model)})


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """The backend's answer to each request, in the order of the documents."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def test_every_loglikelihood_is_that_of_the_hf_backend(ours, reference):
    got, expected = answers(ours, TASK), answers(reference, TASK)
    assert len(got) == len(expected) == 4 * NUM_QUESTIONS
    assert [loglikelihood for loglikelihood, _ in got] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in expected]
    # `hf` adds up in float32.
    assert answers(ours, ROLLING) == pytest.approx(answers(reference, ROLLING), abs=1e-3, rel=2e-7)


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


LETTERS = [" A", " B", " C", " D"]
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def check_loglikelihoods(url: str, model: Path, pairs: list[tuple[str, str]], max_length: int, **options: Any) -> Any:
    """Returns both models."""
    from lm_eval.models.huggingface import HFLM

    from scoremode.lm_eval.model import ScoremodeLM

    ours = ScoremodeLM(url, tokenizer=str(model), max_length=max_length, **options)
    hf = HFLM(pretrained=str(model), dtype="float32", device="cpu", max_length=max_length, batch_size=1)
    found, expected = (each.loglikelihood(instances("loglikelihood", pairs)) for each in (ours, hf))
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    documents = instances("loglikelihood_rolling", [(max((context for context, _ in pairs), key=len),)])
    found, expected = (each.loglikelihood_rolling(documents) for each in (ours, hf))
    # `hf`'s float32 log-softmax is some 1e-5 off for each token.
    assert found == pytest.approx(expected, rel=1e-5)
    return ours, hf


def test_every_shape_of_request_is_answered_as_by_the_hf_backend(smollm2_server, smollm2, wikitext):
    examples = wikitext[30_000:30_400]
    endings = [" the river and", " the river but", " a long way from the sea", ", which", "."]
    pairs = [
        *((f"{examples}{question}\nAnswer:", letter) for question in ("Red?", "Blue?") for letter in LETTERS),
        *((examples, ending) for ending in endings),
        # The space belongs to the continuation, and tokens merge over the boundary.
        *((f"{examples} ", letter) for letter in ("A", "B")),
        *(("See http:", ending) for ending in (" A", "//www")),
        *(("", ending) for ending in (" A", "The river", "<|endoftext|> A")),
        *((wikitext[30_000:33_000], ending) for ending in (" A", *endings)),
        # Some of these are the top tokens.
        *(("1, 2, 3, 4, 5, 6, 7,", ending) for ending in (" 8", " 9", " 8, 9", " 8, 7")),
    ]
    ours, hf = check_loglikelihoods(smollm2_server, smollm2, pairs, 256)
    contexts = [
        (wikitext[30_000:30_200], {"until": ["\n"], "max_gen_toks": 8}),
        (wikitext[30_000:33_000], {"until": [" the"], "max_gen_toks": 16, "do_sample": False}),
    ]
    found, expected = (each.generate_until(instances("generate_until", contexts)) for each in (ours, hf))
    assert found == expected
    ours.tokenizer.chat_template = hf.tokenizer.chat_template = TEMPLATE
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert ours.apply_chat_template(chat, False) == hf.apply_chat_template(chat, False)


def test_bos_is_added_once(plugin_server, byte_fallback_model, wikitext):
    contexts = [wikitext[34_000:34_100], f"<s>{wikitext[34_000:34_100]}", "", wikitext[34_000:35_000]]
    pairs = [(context, ending) for context in contexts for ending in (" A", " the river")]
    check_loglikelihoods(plugin_server, byte_fallback_model, pairs, 100, api_key=API_KEY)


def test_another_tokenizer_than_the_servers_is_refused(server, smollm2):
    from scoremode.lm_eval.model import ScoremodeLM

    with pytest.raises(ValueError, match="is not that of tiny"):
        ScoremodeLM(server, tokenizer=str(smollm2))


@contextmanager
def gated(server: str) -> Iterator[str]:
    """A relay to the server that has the first texts scored, and lets all others wait until the end."""
    asked, over = count(1), Event()

    def relay(request: httpx.Request) -> httpx.Response | None:
        if (request.method, request.url.path) == ("POST", "/v1/score") and next(asked) > 1:
            over.wait()
            return None
        headers = {"Content-Type": "application/json"}
        answer = http.request(request.method, request.url.path, content=request.content, headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)

    with httpx.Client(base_url=server, timeout=300) as http, serve(relay) as url:
        try:
            yield url
        finally:
            over.set()


def test_a_killed_run_resumes_from_its_cache(llama_2_server, tasks, reference, tmp_path, monkeypatch):
    from scoremode.lm_eval.__main__ import NamedCache
    from scoremode.lm_eval.model import ScoremodeLM

    def num_cached() -> int:
        for path in tmp_path.glob("cache_rank0-*.db"):
            with closing(sqlite3.connect(path)) as cache, suppress(sqlite3.OperationalError):
                return int(cache.execute("SELECT count(*) FROM unnamed").fetchone()[0])
        return 0

    cache = str(tmp_path / "cache")
    # One of two requests, each for half of the questions, is answered.
    with gated(llama_2_server) as url:
        command = [
            *(sys.executable, "-m", "scoremode.lm_eval", "run", "--model", "scoremode", "--use_cache", cache),
            *("--model_args", f"base_url={url},num_concurrent=2", "--tasks", TASK, "--limit", str(NUM_QUESTIONS)),
            *("--include_path", str(tasks)),
        ]
        with subprocess.Popen(command) as killed:
            try:
                end = time.monotonic() + 300
                while num_cached() < 2 * NUM_QUESTIONS:
                    assert (killed.poll(), time.monotonic() < end) == (None, True)
                    time.sleep(0.1)
            finally:
                killed.kill()
    num_scored, score = [], ScoremodeLM._loglikelihood_tokens
    monkeypatch.setattr("lm_eval.api.model.CachingLM", NamedCache)
    monkeypatch.setattr(
        ScoremodeLM,
        "_loglikelihood_tokens",
        lambda *given, **each: num_scored.append(len(given[1])) or score(*given, **each),
    )
    resumed = evaluate(tasks, ScoremodeLM(llama_2_server), {}, use_cache=cache)
    assert num_scored == [2 * NUM_QUESTIONS]
    found, expected = ([logprob for logprob, _ in answers(each, TASK)] for each in (resumed, reference))
    assert found == pytest.approx(expected, abs=1e-3)
