"""What a soak takes for a wrong answer."""

import base64
import json
import random
from typing import Any

import numpy as np
import pytest
import soak_asks
from soak_asks import Ask, WrongAnswerError

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
    assert soak_asks.score_difference(answer, LOGPROBS) == pytest.approx(0.03)


def test_base64_is_read():
    encoded = base64.b64encode(np.array([np.nan, -1.0, -2.0], dtype="<f4").tobytes()).decode()
    assert soak_asks.score_difference(score(encoded, [None, -0.25]), LOGPROBS) == 0.5


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
        soak_asks.score_difference(score(*logprobs), LOGPROBS)


def test_generated_tokens_are_left_out_of_an_echo():
    answer = completion([None, -1.0, -2.5, -9.0], [None, -0.25, -9.0])
    assert soak_asks.echo_difference(answer, LOGPROBS, generated=1) == 0
    with pytest.raises(WrongAnswerError):
        soak_asks.echo_difference(answer, LOGPROBS, generated=0)


def test_windows_and_result_of_a_stream_are_compared():
    windows = [(100, 250.0), (50, 100.0)]
    answer = stream(window(100, 250.0), window(50, 100.5), window(150, 350.5), "[DONE]")
    assert soak_asks.stream_difference(answer, windows) == pytest.approx(0.01)


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
        soak_asks.stream_difference(stream(*events), [(100, 250.0)])


@pytest.mark.parametrize(
    ("status", "answer"),
    [(500, b"{}"), (200, b"no JSON"), (200, b'{"data": [{}]}'), (200, score([None, -1.0, -2.503], [None, -0.25]))],
    ids=["status", "no JSON", "no logprobs", "beyond the bar"],
)
def test_what_is_not_a_right_answer(status: int, answer: bytes):
    ask = Ask("/v1/score", {}, lambda content: soak_asks.score_difference(content, LOGPROBS))
    assert soak_asks.check(ask, 200, score([None, -1.0, -2.501], [None, -0.25])) == pytest.approx(1e-3)
    with pytest.raises(WrongAnswerError):
        soak_asks.check(ask, status, answer)


@pytest.mark.parametrize(
    "draw", [soak_asks.draw_score, soak_asks.draw_continuations, soak_asks.draw_completion, soak_asks.draw_perplexity]
)
def test_requests_know_their_right_answer(draw):
    """On a model whose logprob of a token is the negative of its id, divided by 100, whatever comes before it."""

    def logprobs(token_ids: list[int]) -> np.ndarray:
        return -np.array(token_ids[1:]) / 100

    rng = random.Random(0)
    passages = [
        soak_asks.make_passage(f"text {index}", [rng.randrange(100) for _ in range(rng.randrange(2, 400))], logprobs)
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
        windows = soak_asks.cut_windows(len(sequences[0]), **soak_asks.WINDOWS)
        nlls = [-logprobs(each.token_ids(sequences[0]))[each.first_scored - 1 :] for each in windows]
        sums = [window(len(each), each.sum()) for each in nlls]
        return stream(*sums, window(sum(map(len, nlls)), sum(each.sum() for each in nlls)), "[DONE]")
    if "echo" in body:
        return completion(*([None, *logprobs(each), *[-1.0] * body["max_tokens"]] for each in sequences))
    if "continuations" in body:
        return score(*(list(logprobs([*prompt, *each])[-len(each) :]) for each in body["continuations"]))
    return score(*([None, *logprobs(each)] for each in sequences))
