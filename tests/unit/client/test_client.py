"""What the clients send, and what they make of the answers."""

import json

import httpx
import pytest
from fake_server import (
    BOS,
    INFO,
    FakeServer,
    Outcomes,
    answer,
    changed,
    encoded,
    error,
    events,
    logprob,
    ok,
    result_event,
    score_response,
    window_event,
)

import scoremode
from scoremode.wire.protocol import PerplexityRequest, ScoreRequest


def streaming(*items):
    return Outcomes(httpx.Response(200, content=events(*items)))


def test_score_gives_exact_logprobs_and_none_at_the_first_token(call):
    [score] = call(answer, "score", [[BOS, 72, 105]])
    assert score.token_ids == [BOS, 72, 105]
    assert score.logprobs == [None, logprob([BOS, 72], 1), logprob([BOS, 72, 105], 2)]
    assert score.nlls == [-score.logprobs[1], -score.logprobs[2]]
    assert score.num_scored == 2
    assert (score.ranks, score.is_greedy, score.tokens, score.top_logprobs) == (None, None, None, None)


@pytest.mark.parametrize(
    ("values", "read"),
    [("AADAfwAAgL8=", [None, -1.0]), (encoded([float("nan"), float("-inf")], "<f4"), [None, -9999.0])],
    ids=["0x7fc00000 NaN, 0xbf800000 -1.0, low byte first", "minus infinity as in JSON"],
)
def test_base64_is_little_endian_float32(call, values, read):
    server = changed(answer, "/v1/score", lambda content: content["data"][0].update(logprobs=values))
    [score] = call(server, "score", [[BOS, 1]])
    assert score.logprobs == read


def test_every_field_of_a_score_request_is_sent_and_its_answer_read(call):
    result = score_response([[65]])
    result["data"][0] |= {
        "continuation_index": 0,
        "logprobs": "AAAAvw==",
        "ranks": [1],
        "is_greedy": True,
        "tokens": ["A"],
        "top_logprobs": {"shape": [1, 1], "token_ids": "QQAAAA==", "logprobs": "AAAAvw=="},
        "candidate_logprobs": {"shape": [1, 2], "logprobs": "AAAAvwAAgL8="},
    }
    server = Outcomes(ok(result))
    options = {"top_logprobs": 1, "candidate_token_ids": [65, 66], "temperature": 0.5, "add_special_tokens": False}
    options |= {"return_ranks": True, "return_tokens": True, "use_cache": False, "model": "adapter"}
    [score] = call(server, "score", "text", ["A"], **options)
    assert (score.continuation_index, score.ranks, score.is_greedy, score.tokens) == (0, [1], True, ["A"])
    assert score.top_logprobs.token_ids.tolist() == [[65]]
    assert score.top_logprobs.logprobs.tolist() == [[-0.5]]
    assert score.candidate_logprobs.tolist() == [[-0.5, -1.0]]
    sent = json.loads(server.requests[0].content)
    assert ScoreRequest.model_validate(sent).model == "adapter"
    assert sent == {
        "prompt": "text",
        "continuations": ["A"],
        "encoding_format": "base64",
        **options,
    }


def test_info_and_tokens(call):
    info = call(answer, "info")
    assert (info.model, info.max_model_len, info.chunk_token_id) == ("bytes", 64, BOS)
    assert call(answer, "tokenize", "Hi") == [BOS, 72, 105]
    assert call(answer, "tokenize", "Hi", add_special_tokens=False) == [72, 105]
    assert call(answer, "detokenize", [72, 105]) == "Hi"
    server = FakeServer()
    assert call(server, "token_texts", [105, 72, 105, BOS], client={"model": "m"}) == {72: "H", 105: "i", BOS: "<s>"}
    assert server.requests == [("POST", "/v1/tokens", {"model": "m", "token_ids": [72, 105, BOS]})]
    with pytest.raises(scoremode.ResponseError, match="1 texts for 2 tokens"):
        call(Outcomes(ok({"object": "tokens", "tokens": ["H"]})), "token_texts", [72, 105])


def test_the_api_key_is_the_argument_or_else_the_environments(call, monkeypatch):
    server = Outcomes(ok(INFO))
    call(server, "info")
    monkeypatch.setenv("SCOREMODE_API_KEY", "from-environment")
    call(server, "info")
    call(server, "info", client={"api_key": "given"})
    keys = [request.headers.get("Authorization") for request in server.requests]
    assert keys == [None, "Bearer from-environment", "Bearer given"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, scoremode.BadRequestError),
        (401, scoremode.AuthenticationError),
        (403, scoremode.AuthenticationError),
        (404, scoremode.NotFoundError),
        (413, scoremode.APIStatusError),
        (422, scoremode.BadRequestError),
        (429, scoremode.RateLimitError),
        (500, scoremode.ServerError),
        (503, scoremode.ServerError),
    ],
)
def test_each_status_has_its_error(call, status, kind):
    server = Outcomes(error(status, "it went wrong", param="prompt", type="SomeError"))
    with pytest.raises(scoremode.APIStatusError, match="it went wrong") as caught:
        call(server, "tokenize", "x", client={"max_retries": 0})
    assert type(caught.value) is kind
    assert (caught.value.status_code, caught.value.param, caught.value.type) == (status, "prompt", "SomeError")


VALIDATION = {"detail": [{"loc": ["body", "stride"], "msg": "must be positive"}]}


@pytest.mark.parametrize(
    ("response", "message", "param"),
    [
        (httpx.Response(400, json={"detail": "no such thing"}), "no such thing", None),
        (httpx.Response(422, json=VALIDATION), "must be positive", "stride"),
        (httpx.Response(401, json={"error": "Unauthorized"}), "Unauthorized", None),
        (httpx.Response(500, text="<html>proxy says no</html>"), "proxy says no", None),
        (httpx.Response(500, content=b"\xff\xfe"), "HTTP 500", None),
        (httpx.Response(500), "Internal Server Error", None),
        (httpx.Response(599, json=[1, 2]), r"\[1, ?2\]", None),
        (httpx.Response(302, headers={"Location": "/login"}), "Found", None),
    ],
    ids=["detail", "detail list", "vLLM's bare text", "html", "not UTF-8", "empty", "other JSON", "redirect"],
)
def test_errors_of_other_shapes_are_read_too(call, response, message, param):
    with pytest.raises(scoremode.APIStatusError, match=message) as caught:
        call(Outcomes(response), "tokenize", "x")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("method", "arguments"), [("score", ["x"]), ("reference", ["base"]), ("references", []), ("kld", ["base"])], ids=str
)
def test_only_a_server_without_the_route_is_called_no_scoremode(call, method, arguments):
    for body in ({"detail": "Not Found"}, {"error": {"message": "Not Found", "code": 404}}):
        with pytest.raises(scoremode.NotFoundError, match=r"probably not Scoremode.*scoremode serve"):
            call(Outcomes(httpx.Response(404, json=body)), method, *arguments)
    with pytest.raises(scoremode.NotFoundError, match=r"^the model `x` does not exist \(HTTP 404\)$"):
        call(Outcomes(error(404, "the model `x` does not exist")), method, *arguments)


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
def test_a_score_that_breaks_the_protocol_is_an_error(call, change):
    server = changed(answer, "/v1/score", lambda content: content["data"][0].update(change))
    with pytest.raises(scoremode.ResponseError):
        call(server, "score", [[BOS, 1]])


def test_an_answer_that_is_not_json_is_an_error(call):
    with pytest.raises(scoremode.ResponseError, match="protocol"):
        call(Outcomes(httpx.Response(200, text="<html>welcome</html>")), "info")


def test_perplexity_reports_windows_and_returns_the_result(call):
    first = window_event(0, 2, [1.0, 2.0], total_scored=2, perplexity=4.5)
    server = streaming(first, window_event(1, 2, [3.0], total_scored=3, perplexity=7.4), result_event(perplexity=7.4))
    windows = []
    result = call(server, "perplexity", "text", on_window=windows.append)
    assert [(window.index, window.nll_sum, window.perplexity) for window in windows] == [(0, 3.0, 4.5), (1, 3.0, 7.4)]
    assert (result.perplexity, result.num_words) == (7.4, 3)
    fields = {"texts": ["a"], "method": "rolling", "context_length": 8, "max_tokens": 5}
    assert call(server, "perplexity", **fields) == result, "without a callback"
    sent = PerplexityRequest.model_validate_json(server.requests[1].content)
    assert sent.model_dump(exclude_unset=True) == {**fields, "stream": True}


@pytest.mark.parametrize(
    ("code", "kind"), [(400, scoremode.BadRequestError), (503, scoremode.ServerError), ("odd", scoremode.ServerError)]
)
def test_an_error_within_a_stream_is_raised_by_its_code(call, code, kind):
    with pytest.raises(kind, match="window 3 failed") as caught:
        call(
            streaming({"error": {"message": "window 3 failed", "code": code, "param": "prompt"}}), "perplexity", "text"
        )
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
@pytest.mark.parametrize(("method", "options"), [("perplexity", {}), ("kld", {"as_noise_floor": True})])
def test_a_stream_that_breaks_the_protocol_is_an_error(call, stream, method, options):
    with pytest.raises(scoremode.ResponseError):
        call(Outcomes(httpx.Response(200, content=stream)), method, "text", **options)
