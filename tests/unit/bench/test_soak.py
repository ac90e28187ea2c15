"""What a soak takes for a wrong answer, for something left over, and for growth."""

import base64
import json
import random
import subprocess
from typing import Any

import numpy as np
import pytest
import soak
from soak import Ask, Growth, Usage, WrongAnswerError

NAN = float("nan")
LOGPROBS = [np.array([NAN, -1.0, -2.5]), np.array([NAN, -0.25])]


def score(*logprobs: Any) -> bytes:
    return json.dumps({"data": [{"logprobs": each} for each in logprobs]}).encode()


def completion(*token_logprobs: Any) -> bytes:
    return json.dumps({"choices": [{"logprobs": {"token_logprobs": each}} for each in token_logprobs]}).encode()


def stream(*events: Any) -> bytes:
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events).encode()


def window(num_scored: int, nll_sum: float) -> dict[str, float]:
    return {"num_scored": num_scored, "nll_sum": nll_sum}


def test_the_difference_is_that_of_the_worst_token():
    answer = score([None, -1.001, -2.5], [None, -0.28])
    assert soak.score_difference(answer, LOGPROBS) == pytest.approx(0.03)


def test_base64_is_read():
    encoded = base64.b64encode(np.array([np.nan, -1.0, -2.0], dtype="<f4").tobytes()).decode()
    assert soak.score_difference(score(encoded, [None, -0.25]), LOGPROBS) == 0.5


@pytest.mark.parametrize(
    "logprobs",
    [
        ([None, -1.0, -2.5],),
        ([None, -1.0], [None, -0.25]),
        ([None, -1.0, None], [None, -0.25]),
        ([-3.0, -1.0, -2.5], [None, -0.25]),
    ],
    ids=["a sequence is missing", "a token is missing", "a logprob is missing", "the first token has one"],
)
def test_another_shape_is_wrong(logprobs: tuple[list[float | None], ...]):
    with pytest.raises(WrongAnswerError):
        soak.score_difference(score(*logprobs), LOGPROBS)


def test_generated_tokens_are_left_out_of_an_echo():
    answer = completion([None, -1.0, -2.5, -9.0], [None, -0.25, -9.0])
    assert soak.echo_difference(answer, LOGPROBS, generated=1) == 0
    with pytest.raises(WrongAnswerError):
        soak.echo_difference(answer, LOGPROBS, generated=0)


def test_windows_and_result_of_a_stream_are_compared():
    windows = [(100, 250.0), (50, 100.0)]
    answer = stream(window(100, 250.0), window(50, 100.5), window(150, 350.5), "[DONE]")
    assert soak.stream_difference(answer, windows) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "events",
    [
        (window(100, 250.0), window(100, 250.0)),
        (window(100, 250.0), "[DONE]"),
        ({"error": {"message": "busy"}}, "[DONE]"),
        (window(99, 250.0), window(99, 250.0), "[DONE]"),
    ],
    ids=["cut off", "without a result", "an error", "other windows"],
)
def test_a_stream_that_is_not_whole_is_wrong(events: tuple[Any, ...]):
    with pytest.raises(WrongAnswerError):
        soak.stream_difference(stream(*events), [(100, 250.0)])


@pytest.mark.parametrize(
    ("status", "answer"),
    [(500, b"{}"), (200, b"no JSON"), (200, b'{"data": [{}]}'), (200, score([None, -1.0, -2.503], [None, -0.25]))],
    ids=["status", "no JSON", "no logprobs", "beyond the bar"],
)
def test_what_is_not_a_right_answer(status: int, answer: bytes):
    ask = Ask("/v1/score", {}, lambda content: soak.score_difference(content, LOGPROBS))
    assert soak.check(ask, 200, score([None, -1.0, -2.501], [None, -0.25])) == pytest.approx(1e-3)
    with pytest.raises(WrongAnswerError):
        soak.check(ask, status, answer)


@pytest.mark.parametrize("draw", [soak.draw_score, soak.draw_continuations, soak.draw_completion, soak.draw_perplexity])
def test_requests_know_their_right_answer(draw):
    """On a model whose logprob of a token is the negative of its id, divided by 100, whatever comes before it."""

    def logprobs(token_ids: list[int]) -> np.ndarray:
        return -np.array(token_ids[1:]) / 100

    rng = random.Random(0)
    passages = [
        soak.make_passage(f"text {index}", [rng.randrange(100) for _ in range(rng.randrange(2, 400))], logprobs)
        for index in range(8)
    ]
    tokens_of = {passage.text: passage.token_ids for passage in passages}
    for _ in range(50):
        ask = draw(passages, rng)
        assert ask.difference(answered(ask.body, tokens_of, logprobs)) < 1e-6


def answered(body: dict[str, Any], tokens_of: dict[str, list[int]], logprobs: Any) -> bytes:
    prompt = body["prompt"]
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    sequences = [tokens_of[each] if isinstance(each, str) else each for each in prompts]
    if "stream" in body:
        windows = soak.cut_windows(len(sequences[0]), **soak.WINDOWS)
        nlls = [-logprobs(each.token_ids(sequences[0]))[each.first_scored - 1 :] for each in windows]
        sums = [window(len(each), each.sum()) for each in nlls]
        return stream(*sums, window(sum(map(len, nlls)), sum(each.sum() for each in nlls)), "[DONE]")
    if "echo" in body:
        return completion(*([None, *logprobs(each), *[-1.0] * body["max_tokens"]] for each in sequences))
    if "continuations" in body:
        return score(*(list(logprobs([*prompt, *each])[-len(each) :]) for each in body["continuations"]))
    return score(*([None, *logprobs(each)] for each in sequences))


def test_metrics_are_summed_over_labels():
    text = '# HELP a b\na{engine="0"} 2.0\na{engine="1"} 3.0\na_by_reason{engine="0"} 9.0\nb 1e+06\n'
    assert soak.metric(text, "a") == 5
    assert soak.metric(text, "b") == 1e6
    with pytest.raises(ValueError, match="no c"):
        soak.metric(text, "c")


def test_memory_of_files_does_not_count():
    rollup = "00400000-7ffe ---p 00000000 00:00 0  [rollup]\nRss: 99 kB\nPss: 90 kB\nPss_Anon: 20 kB\nPss_File: 60 kB\n"
    assert soak.own_bytes(rollup + "Pss_Shmem: 10 kB\nSwap: 7 kB\nSwapPss: 5 kB\n") == 35 * 1024


def test_processes_of_a_session_are_looked_at():
    # A session of its own: what leads this one may belong to another user, whose memory nobody may read.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        found = soak.usage(process.pid)
        process.communicate()
    assert list(found) == [process.pid]
    assert found[process.pid].num_bytes > 0
    assert found[process.pid].open_files >= 3


def usage(num_bytes: int = 0, open_files: int = 0, name: str = "engine") -> Usage:
    return Usage(name, num_bytes, open_files)


def test_growth_is_from_the_first_tenth_to_the_last():
    sizes = [100, 110, *[500] * 16, 120, 132]
    samples = [{1: usage(size), 2: usage(7)} for size in sizes] + [{1: usage(132)}]
    (growth,) = soak.growths(samples[:20])[:1]
    assert (growth.name, growth.first, growth.last) == ("engine (1)", 105, 126)
    assert growth.share == pytest.approx(0.2)
    assert [each.name for each in soak.growths(samples)] == ["engine (1)"], "process 2 is gone, and told of elsewhere"


def test_few_samples_have_a_growth_too():
    assert soak.growths([{1: usage(100)}, {1: usage(103)}]) == [Growth("engine (1)", 100, 103)]


def test_processes_and_files_that_are_left_over():
    before = {1: usage(open_files=10), 2: usage(open_files=10), 3: usage(name="worker")}
    after = {1: usage(open_files=13), 2: usage(open_files=14), 4: usage(name="helper")}
    assert list(soak.left_over(before, after, clients=4)) == [
        "a process is gone: worker (3)",
        "a process is new: helper (4)",
        "engine (2) has 4 more open files",
    ]
    assert list(soak.left_over(before, before, clients=1)) == []


def test_a_load_that_hardly_ran_is_told():
    load = soak.Load("http://localhost", [])
    load.tallies["/v1/score"].right = 5
    load.tallies["/v1/score"].hung_up = 1
    assert [line.partition(":")[0] for line in load.missing()] == ["/v1/completions", "/v1/perplexity"]


def test_tracebacks_of_the_log(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("INFO all is well\n")
    assert soak.tracebacks(log) == []
    log.write_text("Traceback (most recent call last):\n  no\n")
    assert soak.tracebacks(log) == [f"1 tracebacks in {log}"]
