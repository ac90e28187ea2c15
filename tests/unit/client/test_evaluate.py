"""Evaluations against a server whose log-probabilities are known: every figure is worked out anew here."""

import asyncio
import json
import math

import httpx
import pytest
from fake_scoremode import BOS, INFO, answer, copy_of, error, events, logprob, rank, result_event, window_event

from scoremode import AsyncScoreClient, BadRequestError, ResponseError, ServerError
from scoremode.corpora import Corpus
from scoremode.evaluate import evaluate, evaluate_on_server
from scoremode.metrics import TextMetrics
from scoremode.windows import METHODS, WindowError

TEXT = "The quick brown fox jumps over the lazy dog, and on it goes."
CORPUS = Corpus("fox", TEXT, "made up", 1)


def client_of(handler, **settings) -> AsyncScoreClient:
    return AsyncScoreClient("http://fake", transport=httpx.MockTransport(handler), max_retries=0, **settings)


async def run(handler=answer, corpus=CORPUS, **settings):
    async with client_of(handler) as client:
        return await evaluate(client, corpus, **settings)


def windows_by_definition(tokens: list[int], method: str, length: int, stride: int) -> list[tuple[list[int], int]]:
    """Of each window its tokens and the position of its first target, by the table in the design."""
    if method == "sliding":
        cut = [(tokens[:length], 1)]
        for end in range(length + stride, len(tokens) + stride, stride):
            window = tokens[end - length : end]
            new = min(end, len(tokens)) - (end - stride)
            cut.append((window, len(window) - new))
        return cut
    if method in ("overlapping", "disjoint"):
        step = stride if method == "overlapping" else length
        return [(tokens[start : start + length], 1) for start in range(0, len(tokens) - length, step)]
    if method == "llama.cpp":
        chunks = [tokens[chunk * length : (chunk + 1) * length] for chunk in range(len(tokens) // length)]
        return [([BOS, *chunk[1:]], length // 2 + 1) for chunk in chunks]
    fed = [BOS, *tokens]
    last = len(tokens) % length
    cut = [(fed[start : start + length + 1], 1) for start in range(0, len(tokens) - last, length)]
    return cut + ([(fed[-length - 1 :], length + 1 - last)] if last else [])


def nlls_by_definition(tokens: list[int], method: str, length: int, stride: int) -> list[list[float]]:
    return [
        [-logprob(window, position) for position in range(first, len(window))]
        for window, first in windows_by_definition(tokens, method, length, stride)
    ]


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_gives_the_figures_of_its_definition(method):
    evaluation = await run(
        method=method, context_length=8, stride=3 if method in ("sliding", "overlapping") else None, concurrency=3
    )
    tokens = list(TEXT.encode()) if method == "rolling" else [BOS, *TEXT.encode()]
    expected = nlls_by_definition(tokens, method, 8, 3)
    assert [window.nlls for window in evaluation.windows] == expected
    flat = [nll for window in expected for nll in window]
    mean = sum(flat) / len(flat)
    assert evaluation.result.num_scored == len(flat)
    assert evaluation.result.perplexity == pytest.approx(math.exp(mean), rel=1e-12)
    text_nll = sum(flat) if method in ("sliding", "rolling") else mean * len(tokens)
    assert evaluation.text_metrics.bits_per_byte == pytest.approx(text_nll / math.log(2) / len(TEXT))
    assert evaluation.text_metrics.word_perplexity == pytest.approx(math.exp(text_nll / 13))
    assert (evaluation.num_tokens, evaluation.num_bytes, evaluation.num_words) == (len(tokens), len(TEXT), 13)


async def test_ranks_are_of_the_same_targets():
    evaluation = await run(method="llama.cpp", context_length=8, return_ranks=True)
    windows = windows_by_definition([BOS, *TEXT.encode()], "llama.cpp", 8, 8)
    assert [window.ranks for window in evaluation.windows] == [
        [rank(window, position) for position in range(first, len(window))] for window, first in windows
    ]
    assert evaluation.token_ids == [token for window, first in windows for token in window[first:]]
    assert (await run(context_length=8)).windows[0].ranks is None


async def test_settings_left_out_are_resolved_and_kept():
    evaluation = await run()
    assert (evaluation.context_length, evaluation.stride) == (64, 16), "the model's 64 tokens, and a quarter of them"
    assert evaluation.add_special_tokens
    assert not (await run(method="rolling")).add_special_tokens, "lm-eval adds none"
    assert evaluation.model == "bytes"
    assert evaluation.server.scoremode_version == "9.9.9"


async def test_max_tokens_cuts_the_text_that_bytes_and_words_are_counted_on():
    evaluation = await run(max_tokens=10, context_length=8, stride=3)
    assert evaluation.num_tokens == 10
    assert evaluation.num_bytes == len("The quick"), "nine bytes after BOS, which is not part of the text"
    assert evaluation.num_words == 2
    flat = [nll for window in nlls_by_definition([BOS, *b"The quick"], "sliding", 8, 3) for nll in window]
    assert evaluation.text_metrics == TextMetrics(
        pytest.approx(sum(flat) / math.log(2) / 9), pytest.approx(math.exp(sum(flat) / 2))
    )


async def test_max_tokens_of_a_text_that_is_shorter_changes_nothing():
    whole, limited = await run(context_length=8), await run(context_length=8, max_tokens=1000)
    assert limited.windows == whole.windows
    assert limited.num_bytes == whole.num_bytes


async def test_progress_runs_to_the_result():
    steps = []
    evaluation = await run(context_length=8, stride=3, concurrency=1, on_progress=steps.append)
    assert [step.windows_done for step in steps] == list(range(1, len(evaluation.windows) + 1))
    first = evaluation.windows[0].nlls
    assert steps[0].perplexity == pytest.approx(math.exp(sum(first) / len(first)))
    assert steps[-1].num_scored == evaluation.result.num_scored
    assert steps[-1].perplexity == pytest.approx(evaluation.result.perplexity)


async def test_as_many_windows_as_asked_for_are_in_flight_at_once():
    in_flight = most = 0
    all_there = asyncio.Event()

    async def slow(request):
        nonlocal in_flight, most
        if json.loads(request.content or b"{}").get("prompt") and request.url.path == "/v1/score":
            in_flight += 1
            most = max(most, in_flight)
            if in_flight == 4:
                all_there.set()
            await all_there.wait()
            await asyncio.sleep(0)
            in_flight -= 1
        return answer(request)

    await run(slow, context_length=8, stride=2, concurrency=4)
    assert most == 4


async def test_a_failed_window_cancels_the_rest_and_is_raised_as_it_is():
    cancelled = []
    waiting = asyncio.Event()

    async def one_fails(request):
        if request.url.path != "/v1/score" or request.method == "GET":
            return answer(request)
        if not waiting.is_set():
            waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(request)
                raise
        return error(500, "the engine died")

    with pytest.raises(ServerError, match="the engine died"):
        await run(one_fails, context_length=8, concurrency=2)
    assert len(cancelled) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"context_length": 65}, "context_length"),
        ({"method": "rolling", "context_length": 64}, "context_length"),
        ({"context_length": 8, "stride": 9}, "stride"),
        ({"method": "llama.cpp", "context_length": 64}, "context_length"),
    ],
    ids=["longer than the model", "rolling feeds one more", "stride skips tokens", "text too short"],
)
async def test_impossible_windows(settings, field):
    with pytest.raises(WindowError) as caught:
        await run(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [{"token_ids": [1, 2]}, {"logprobs": [None] * 8}, {"ranks": None}, {"ranks": [None] * 8}],
    ids=["other tokens", "no logprob", "no ranks", "no rank"],
)
async def test_scores_that_do_not_fit_the_window_are_not_summed(change):
    def wrong(request):
        response = answer(request)
        if request.url.path == "/v1/score" and request.method == "POST":
            content = response.json()
            content["data"][0] |= change
            if change.get("ranks", ()) is None:
                del content["data"][0]["ranks"]
            if "token_ids" in change:
                content["data"][0]["logprobs"] = [None, -1.0]
            return httpx.Response(200, json=content)
        return response

    with pytest.raises(ResponseError, match="the server"):
        await run(wrong, context_length=8, return_ranks=True)


async def test_the_clients_model_is_asked_for_and_reported():
    models = set()

    def note(request):
        if request.content:
            models.add(json.loads(request.content).get("model"))
        return answer(request)

    async with client_of(note, model="adapter") as client:
        evaluation = await evaluate(client, CORPUS, context_length=8)
    assert models == {"adapter"}
    assert evaluation.model == "adapter"


def perplexity_server(stream: bytes):
    requests = []

    def handler(request):
        if request.url.path == "/v1/perplexity":
            requests.append(json.loads(request.content))
            return httpx.Response(200, content=stream)
        return copy_of(httpx.Response(200, json=INFO))

    return handler, requests


async def test_on_the_server_takes_its_figures_and_its_windows():
    handler, requests = perplexity_server(
        events(
            window_event(1, 2, [5.0] * 4, total_scored=4, perplexity=148.4),
            window_event(0, 2, [0.0] * 6, total_scored=10, perplexity=7.4),
            result_event(),
        )
    )
    steps = []
    async with client_of(handler) as client:
        evaluation = await evaluate_on_server(
            client, CORPUS, context_length=4, stride=1, max_tokens=11, on_progress=steps.append
        )
    assert requests == [
        {"prompt": TEXT, "method": "sliding", "context_length": 4, "stride": 1, "max_tokens": 11, "stream": True}
    ]
    assert [(step.windows_done, step.num_windows, step.num_scored) for step in steps] == [(1, 2, 4), (2, 2, 10)]
    assert [(window.index, window.nll_sum, window.nlls) for window in evaluation.windows] == [
        (0, 0.0, None),
        (1, 20.0, None),
    ]
    assert evaluation.server_side
    assert (evaluation.result.perplexity, evaluation.result.perplexity_stderr) == (7.5, 0.5)
    assert evaluation.text_metrics == TextMetrics(1.25, 99.0)
    assert (evaluation.num_tokens, evaluation.num_bytes, evaluation.num_words) == (11, 10, 3)


async def test_on_the_server_errors_within_the_stream_are_raised():
    handler, _ = perplexity_server(
        events({"error": {"message": "stride is too large", "code": 400, "param": "stride"}})
    )
    async with client_of(handler) as client:
        with pytest.raises(BadRequestError, match="stride is too large"):
            await evaluate_on_server(client, CORPUS)


async def test_on_the_server_a_result_without_text_metrics_is_no_result():
    handler, _ = perplexity_server(events(result_event(num_bytes=None)))
    async with client_of(handler) as client:
        with pytest.raises(ResponseError, match="bytes and words"):
            await evaluate_on_server(client, CORPUS)
