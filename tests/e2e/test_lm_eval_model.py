"""`python -m scoremode.lm_eval` against lm-eval's own `hf` backend in float32, request by request, and after a kill.

Tolerance: as in test_lm_eval.py.
"""

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

import lm_eval_tasks
from tests.e2e.test_lm_eval import NUM_QUESTIONS, TASK
from tests.shared_servers import API_KEY
from tests.unit.client.fake_server import serve

LETTERS = [" A", " B", " C", " D"]
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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
        # Of these some are the most likely tokens.
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
    with pytest.raises(ValueError, match="max_length: 2048 exceeds the server's limit of 2047"):
        ScoremodeLM(server, max_length=2048)


@contextmanager
def gated(server: str, route: str, num_answers: int) -> Iterator[str]:
    """A real server at an address where requests to the route, after so many, have no answer until the end, so that a
    client can be killed before it is done."""
    asked, over = count(1), Event()

    def relay(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == route and next(asked) > num_answers:
            over.wait()
            return None
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        answer = http.request(request.method, request.url.path, content=request.content, headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)

    with httpx.Client(base_url=server, timeout=300) as http, serve(relay) as url:
        try:
            yield url
        finally:
            over.set()


def test_a_killed_run_resumes_from_its_cache(server, tmp_path):
    lm_eval_tasks.write_tasks(tmp_path / "tasks", None)

    def command(url: str, name: str) -> list[str]:
        options = f"base_url={url},num_concurrent=2"
        where = ("--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / name), "--log_samples")
        cache = () if name == "whole" else ("--use_cache", str(tmp_path / "cache"))
        start = (sys.executable, "-m", "scoremode.lm_eval", "run", "--model", "scoremode", "--model_args", options)
        return [*start, "--tasks", TASK, "--limit", str(NUM_QUESTIONS), *where, *cache]

    def num_cached() -> int:
        for path in tmp_path.glob("cache_rank0-v2-*.db"):
            with closing(sqlite3.connect(path)) as cache, suppress(sqlite3.OperationalError):
                return int(cache.execute("SELECT count(*) FROM unnamed").fetchone()[0])
        return 0

    def answers(name: str) -> list[Any]:
        [path] = (tmp_path / name).rglob(f"samples_{TASK}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        return [(float(logprob), is_greedy) for each in samples for [(logprob, is_greedy)] in each["resps"]]

    # One for what is served, and one for half of the questions.
    with gated(server, "/v1/score", 2) as url, subprocess.Popen(command(url, "killed")) as killed:
        try:
            while num_cached() < 4 * NUM_QUESTIONS // 2:
                assert killed.poll() is None
                time.sleep(0.1)
        finally:
            killed.kill()
    resumed = subprocess.run(command(server, "resumed"), capture_output=True, text=True)
    assert f"Cached requests: {2 * NUM_QUESTIONS}, Requests remaining: {2 * NUM_QUESTIONS}" in resumed.stderr
    subprocess.run(command(server, "whole"), check=True)
    found, expected = answers("resumed"), answers("whole")
    assert len(found) == 4 * NUM_QUESTIONS
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
