"""What the clients send, and what they make of the answers."""

import asyncio
import base64
import json
import struct
from threading import Barrier

import httpx
import pytest
from fake_scoremode import (
    BOS,
    INFO,
    answer,
    copy_of,
    error,
    events,
    logprob,
    result_event,
    score_response,
    serve,
    window_event,
)

from scoremode import (
    APIStatusError,
    AsyncScoreClient,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    RateLimitError,
    ResponseError,
    ScoreClient,
    ServerError,
)
from scoremode.protocol import PerplexityRequest, ScoreRequest, TokensRequest


class Recorder:
    """A handler that keeps the requests that it answers."""

    def __init__(self, response: httpx.Response):
        self.response = response
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        return copy_of(self.response)

    @property
    def body(self):
        return json.loads(self.requests[-1].content)


def test_score_gives_exact_float32_logprobs_and_none_at_the_first_token(call):
    [score] = call(answer, "score", [[BOS, 72, 105]])
    assert score.token_ids == [BOS, 72, 105]
    assert score.logprobs == [None, logprob([BOS, 72], 1), logprob([BOS, 72, 105], 2)]
    assert score.nlls == [-score.logprobs[1], -score.logprobs[2]]
    assert score.num_scored == 2
    assert (score.ranks, score.is_greedy, score.tokens, score.top_logprobs) == (None, None, None, None)


def test_base64_is_little_endian_float32(call):
    result = score_response([[BOS, 1]])
    result["data"][0]["logprobs"] = "AADAfwAAgL8="  # 0x7fc00000 NaN, 0xbf800000 -1.0, each with its low byte first
    [score] = call(Recorder(httpx.Response(200, json=result)), "score", [[BOS, 1]])
    assert score.logprobs == [None, -1.0]


def test_minus_infinity_reads_as_it_does_in_json(call):
    result = score_response([[BOS, 1]])
    result["data"][0]["logprobs"] = base64.b64encode(struct.pack("<2f", float("nan"), float("-inf"))).decode()
    [score] = call(Recorder(httpx.Response(200, json=result)), "score", [[BOS, 1]])
    assert score.logprobs == [None, -9999.0]


def test_score_with_everything_asked_for(call):
    result = score_response([[65]])
    result["data"][0] |= {
        "continuation_index": 0,
        "token_ids": [65],
        "logprobs": [-0.5],
        "ranks": [1],
        "is_greedy": True,
        "tokens": ["A"],
        "top_logprobs": {"shape": [1, 1], "token_ids": "QQAAAA==", "logprobs": "AAAAvw=="},
        "candidate_logprobs": {"shape": [1, 2], "logprobs": "AAAAvwAAgL8="},
    }
    server = Recorder(httpx.Response(200, json=result))
    [score] = call(
        server,
        "score",
        "text",
        ["A"],
        add_special_tokens=False,
        top_logprobs=1,
        candidate_token_ids=[65, 66],
        temperature=0.5,
        return_ranks=True,
        return_tokens=True,
        use_cache=False,
        model="adapter",
    )
    assert (score.continuation_index, score.ranks, score.is_greedy, score.tokens) == (0, [1], True, ["A"])
    assert score.top_logprobs.token_ids.tolist() == [[65]]
    assert score.top_logprobs.logprobs.tolist() == [[-0.5]]
    assert score.candidate_logprobs.tolist() == [[-0.5, -1.0]]
    assert server.body == {
        "model": "adapter",
        "prompt": "text",
        "continuations": ["A"],
        "add_special_tokens": False,
        "top_logprobs": 1,
        "candidate_token_ids": [65, 66],
        "temperature": 0.5,
        "return_ranks": True,
        "return_tokens": True,
        "use_cache": False,
        "encoding_format": "base64",
    }


def test_bodies_are_what_the_protocol_accepts(call):
    scoring = Recorder(httpx.Response(200, json=score_response([])))
    call(scoring, "score", ["a", "b"], client={"model": "m"})
    assert ScoreRequest.model_validate(scoring.body).model == "m"
    measuring = Recorder(httpx.Response(200, content=events(result_event())))
    call(measuring, "perplexity", texts=["a"], method="rolling", context_length=8, max_tokens=5)
    request = PerplexityRequest.model_validate(measuring.body)
    assert (request.texts, request.stream, request.prompt) == (["a"], True, None)


def test_info(call):
    info = call(answer, "info")
    assert (info.model, info.max_model_len, info.chunk_token_id) == ("bytes", 64, BOS)


def test_tokenize_and_detokenize(call):
    assert call(answer, "tokenize", "Hi") == [BOS, 72, 105]
    assert call(answer, "tokenize", "Hi", add_special_tokens=False) == [72, 105]
    assert call(answer, "detokenize", [72, 105]) == "Hi"


def test_texts_of_tokens_are_asked_for_once_each(call):
    bodies = []

    def noting(request):
        bodies.append(TokensRequest.model_validate_json(request.content))
        return answer(request)

    assert call(noting, "token_texts", [105, 72, 105, BOS], client={"model": "m"}) == {72: "H", 105: "i", BOS: "<s>"}
    assert (bodies[0].token_ids, bodies[0].model) == ([72, 105, BOS], "m")


def test_an_answer_with_fewer_texts_is_refused(call):
    def mute(request):
        return httpx.Response(200, json={"object": "tokens", "tokens": ["H"]})

    with pytest.raises(ResponseError, match="1 texts for 2 tokens"):
        call(mute, "token_texts", [72, 105])


@pytest.mark.parametrize("base_url", ["http://fake", "http://fake/", "http://fake/v1", "http://fake/v1/"])
def test_base_url_with_and_without_v1(call, base_url):
    server = Recorder(httpx.Response(200, json=INFO))
    call(server, "info", client={"base_url": base_url})
    assert str(server.requests[0].url) == "http://fake/v1/score"


@pytest.mark.parametrize("base_url", ["localhost:8000", "ftp://fake", "http://", "", "http://fake:99999"])
def test_base_url_that_is_none(base_url):
    with pytest.raises(ValueError, match="not a server address"):
        ScoreClient(base_url)


def test_api_key_is_a_bearer_token_from_the_argument_or_else_the_environment(call, monkeypatch):
    server = Recorder(httpx.Response(200, json=INFO))
    call(server, "info")
    monkeypatch.setenv("SCOREMODE_API_KEY", "from-environment")
    call(server, "info")
    call(server, "info", client={"api_key": "given"})
    assert [request.headers.get("Authorization") for request in server.requests] == [
        None,
        "Bearer from-environment",
        "Bearer given",
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, NotFoundError),
        (413, APIStatusError),
        (422, BadRequestError),
        (429, RateLimitError),
        (500, ServerError),
        (503, ServerError),
    ],
)
def test_errors_by_status(call, status, kind):
    server = Recorder(error(status, "it went wrong", param="prompt", type="SomeError"))
    with pytest.raises(APIStatusError, match="it went wrong") as caught:
        call(server, "tokenize", "x", client={"max_retries": 0})
    assert type(caught.value) is kind
    assert (caught.value.status_code, caught.value.param, caught.value.type) == (status, "prompt", "SomeError")


@pytest.mark.parametrize(
    ("response", "message", "param"),
    [
        (httpx.Response(400, json={"detail": "no such thing"}), "no such thing", None),
        (
            httpx.Response(422, json={"detail": [{"loc": ["body", "stride"], "msg": "must be positive"}]}),
            "must be positive",
            "stride",
        ),
        (httpx.Response(401, json={"error": "Unauthorized"}), "Unauthorized", None),
        (httpx.Response(500, text="<html>proxy says no</html>"), "proxy says no", None),
        (httpx.Response(500, content=b"\xff\xfe"), "HTTP 500", None),
        (httpx.Response(500), "Internal Server Error", None),
        (httpx.Response(599, json=[1, 2]), r"\[1, ?2\]", None),
        (httpx.Response(302, headers={"Location": "/login"}), "Found", None),
    ],
    ids=["detail", "detail list", "vLLM's bare text", "html", "not UTF-8", "empty", "other JSON", "redirect"],
)
def test_errors_of_other_shapes(call, response, message, param):
    with pytest.raises(APIStatusError, match=message) as caught:
        call(Recorder(response), "tokenize", "x")
    assert caught.value.param == param


def test_a_server_without_the_route_is_said_not_to_be_scoremode(call):
    with pytest.raises(NotFoundError, match="scoremode serve"):
        call(Recorder(httpx.Response(404, json={"detail": "Not Found"})), "score", "x")


def test_an_unknown_model_is_not_taken_for_another_server(call):
    server = Recorder(error(404, "The model `x` does not exist.", param="model"))
    with pytest.raises(NotFoundError, match="does not exist") as caught:
        call(server, "score", "x", model="x")
    assert "scoremode serve" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": "not base64!"},
        {"logprobs": "AAAA"},
        {"logprobs": [-1.0]},
        {"logprobs": None},
        {"token_ids": ["a", "b"]},
    ],
    ids=["not base64", "not whole floats", "one logprob for two tokens", "no logprobs", "tokens of another type"],
)
def test_a_score_that_is_not_what_the_protocol_says(call, change):
    result = score_response([[BOS, 1]])
    result["data"][0] |= change
    with pytest.raises(ResponseError):
        call(Recorder(httpx.Response(200, json=result)), "score", [[BOS, 1]])


def test_an_answer_that_is_not_json(call):
    with pytest.raises(ResponseError, match="protocol"):
        call(Recorder(httpx.Response(200, text="<html>welcome</html>")), "info")


def test_perplexity_reports_windows_and_returns_the_result(call):
    stream = events(
        window_event(0, 2, [1.0, 2.0], total_scored=2, perplexity=4.5),
        window_event(1, 2, [3.0], total_scored=3, perplexity=7.4),
        result_event(perplexity=7.4),
    )
    windows = []
    result = call(Recorder(httpx.Response(200, content=stream)), "perplexity", "text", on_window=windows.append)
    assert [(window.index, window.nll_sum, window.perplexity) for window in windows] == [(0, 3.0, 4.5), (1, 3.0, 7.4)]
    assert (result.perplexity, result.num_words) == (7.4, 3)


def test_perplexity_needs_no_callback(call):
    stream = events(window_event(0, 1, [1.0], total_scored=1, perplexity=2.7), result_event())
    assert call(Recorder(httpx.Response(200, content=stream)), "perplexity", "text").perplexity == 7.5


@pytest.mark.parametrize(("code", "kind"), [(400, BadRequestError), (503, ServerError), ("odd", ServerError)])
def test_an_error_within_a_stream_is_raised_by_its_code(call, code, kind):
    stream = events({"error": {"message": "window 3 failed", "code": code, "param": "prompt"}})
    with pytest.raises(kind, match="window 3 failed") as caught:
        call(Recorder(httpx.Response(200, content=stream)), "perplexity", "text")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]\n\n",
        b'data: {"object": "perplexity"',
        events({"object": "perplexity"}),
        events({"object": "surprise"}),
        b"data: {\n\n",
        b"data: []\n\n",
    ],
    ids=["empty", "no result", "cut off", "result without figures", "unknown event", "not JSON", "not an object"],
)
def test_a_stream_that_is_not_what_the_protocol_says(call, stream):
    with pytest.raises(ResponseError):
        call(Recorder(httpx.Response(200, content=stream)), "perplexity", "text")


async def test_more_requests_are_in_flight_than_httpx_lets_by_itself():
    count = 120
    all_are_here = Barrier(count)

    def answer_together(request: httpx.Request) -> httpx.Response:
        all_are_here.wait(timeout=60)
        return answer(request)

    with serve(answer_together) as url:
        async with AsyncScoreClient(url, max_retries=0) as client:
            infos = await asyncio.gather(*(client.info() for _ in range(count)))
    assert len(infos) == count
