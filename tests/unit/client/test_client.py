"""Clients send the right requests, and read answers and events, however the network cuts them."""

import json

import httpx
import pytest
from fake_server import (
    BOS,
    FINGERPRINT,
    INFO,
    FakeServer,
    Outcomes,
    changed,
    encoded,
    error,
    events,
    ok,
    result_event,
    score_response,
    window_event,
)
from hypothesis import given
from hypothesis import strategies as st

import scoremode
from scoremode.wire.calls import EventParser
from scoremode.wire.protocol import PerplexityRequest, ScoreRequest
from scoremode.wire.references import KldRequest, ReferenceRequest


@pytest.mark.parametrize(
    ("values", "read"),
    # 0x7fc00000 is NaN, 0xbf800000 is -1.0, the low byte first. Minus infinity is as in JSON.
    [("AADAfwAAgL8=", [None, -1.0]), (encoded([float("nan"), float("-inf")], "<f4"), [None, -9999.0])],
)
def test_base64_is_little_endian_float32(call, values, read):
    server = changed(FakeServer(), "/v1/score", lambda content: content["data"][0].update(logprobs=values))
    [score] = call(server, "score", [[BOS, 1]])
    assert (score.logprobs, score.nlls) == (read, [-read[1]])


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
    options = {
        "top_logprobs": 1,
        "candidate_token_ids": [65, 66],
        "temperature": 0.5,
        "add_special_tokens": False,
        "return_ranks": True,
        "return_tokens": True,
        "use_cache": False,
        "model": "adapter",
    }
    [score] = call(server, "score", "text", ["A"], **options)
    assert (score.continuation_index, score.ranks, score.is_greedy, score.tokens) == (0, [1], True, ["A"])
    assert score.top_logprobs.token_ids.tolist() == [[65]]
    assert score.top_logprobs.logprobs.tolist() == [[-0.5]]
    assert score.candidate_logprobs.tolist() == [[-0.5, -1.0]]
    sent = json.loads(server.requests[0].content)
    assert ScoreRequest.model_validate(sent).model == "adapter"
    assert sent == {"prompt": "text", "continuations": ["A"], "encoding_format": "base64", **options}


def test_info_and_tokens(call):
    info = call(server := Outcomes(ok(INFO)), "info", client={"model": "an adapter/1"})
    assert (info.model, info.max_model_len, info.chunk_token_id) == ("bytes", 64, BOS)
    assert server.requests[0].url.query == b"model=an%20adapter%2F1"
    assert call(FakeServer(), "tokenize", "Hi", add_special_tokens=False) == [72, 105]
    server = FakeServer()
    assert call(server, "token_texts", [105, 72, 105, BOS], client={"model": "m"}) == {72: "H", 105: "i", BOS: "<s>"}
    assert server.requests == [("POST", "/v1/tokens", {"model": "m", "token_ids": [72, 105, BOS]})]
    with pytest.raises(scoremode.ResponseError, match="protocol"):
        call(Outcomes(httpx.Response(200, text="<html>welcome</html>")), "info")


def test_texts_of_tokens_that_end_within_a_character_are_joined(call):
    answer = {"object": "tokens", "tokens": ["\ufffd", "\ufffd", "."], "bytes": ["e4b8", "ad", None]}
    texts = call(Outcomes(ok(answer)), "token_texts", [1, 2, 3])
    assert (texts[1], texts.contents) == ("\ufffd", {1: "e4b8", 2: "ad"})
    assert (texts.joined([1, 2, 3]), texts.joined([1, 3, 9])) == ("中.", "\ufffd.token 9")
    for wrong, message in ((["e4"], "1 texts|3 texts"), (["e4", "xy", None], "not hexadecimal")):
        with pytest.raises(scoremode.ResponseError, match=message):
            call(Outcomes(ok({**answer, "bytes": wrong})), "token_texts", [1, 2, 3])


def test_the_api_key_is_the_argument_or_else_the_environments(call, monkeypatch):
    server = Outcomes(ok(INFO))
    call(server, "info")
    monkeypatch.setenv("SCOREMODE_API_KEY", "from-environment")
    call(server, "info")
    call(server, "info", client={"api_key": "given"})
    keys = [request.headers.get("Authorization") for request in server.requests]
    assert keys == [None, "Bearer from-environment", "Bearer given"]


@pytest.mark.parametrize(
    ("response", "kind", "message", "param"),
    [
        *(
            (
                error(status, "it went wrong", param="prompt", type="SomeError"),
                f"{kind}Error",
                "it went wrong",
                "prompt",
            )
            for status, kind in ((400, "BadRequest"), (401, "Authentication"), (404, "NotFound"), (429, "RateLimit"))
        ),
        (httpx.Response(401, json={"error": "Unauthorized"}), "AuthenticationError", "Unauthorized", None),
        (
            httpx.Response(422, json={"detail": [{"loc": ["body", "stride"], "msg": "must be positive"}]}),
            *("BadRequestError", "must be positive", "stride"),
        ),
        (httpx.Response(500, text="<html>proxy says no</html>"), "ServerError", "proxy says no", None),
        (error(503, "it went wrong", type="SomeError"), "ServerError", "it went wrong", None),
    ],
)
def test_each_error_has_its_kind_message_and_field(call, response, kind, message, param):
    with pytest.raises(scoremode.APIStatusError, match=message) as caught:
        call(Outcomes(response), "tokenize", "x", client={"max_retries": 0})
    found = caught.value
    assert (type(found).__name__, found.status_code, found.param) == (kind, response.status_code, param)
    assert (found.type == "SomeError") == (message == "it went wrong")


@pytest.mark.parametrize("method", ["score", "kld"])
@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(404, json={"detail": "Not Found"}), "probably not Scoremode.*scoremode serve"),
        (error(404, "the model `x` does not exist"), r"^the model `x` does not exist \(HTTP 404\)$"),
    ],
)
def test_only_a_server_without_the_route_is_called_no_scoremode(call, method, response, message):
    with pytest.raises(scoremode.NotFoundError, match=message):
        call(Outcomes(response), method, "x")


def test_perplexity_reports_windows_and_returns_the_result(call):
    first = window_event(0, 2, [1.0, 2.0], total_scored=2, perplexity=4.5)
    second = window_event(1, 2, [3.0], total_scored=3, perplexity=7.4)
    server = Outcomes(httpx.Response(200, content=events(first, second, result_event(perplexity=7.4))))
    windows = []
    result = call(server, "perplexity", "text", on_window=windows.append)
    assert [(window.index, window.nll_sum, window.perplexity) for window in windows] == [(0, 3.0, 4.5), (1, 3.0, 7.4)]
    assert (result.perplexity, result.num_words) == (7.4, 3)
    fields = {"texts": ["a"], "method": "rolling", "context_length": 8, "max_tokens": 5}
    assert call(server, "perplexity", **fields) == result, "without a callback"
    sent = PerplexityRequest.model_validate_json(server.requests[1].content)
    assert sent.model_dump(exclude_unset=True) == {**fields, "stream": True}


TEXT = "Hello, world"
SETTINGS = {"method": "disjoint", "context_length": 4}


@pytest.fixture
def server(call):
    """Has recorded `TEXT` as `base`, and then serves another model."""
    recording = FakeServer()
    call(recording, "record_reference", "base", TEXT, **SETTINGS)
    return FakeServer(recording.references, noise=0.5)


def test_a_recording_whose_connection_is_lost_is_resumed(call, waits):
    server, windows = FakeServer(allowed=2), []
    settings = {**SETTINGS, "client": {"model": "m"}}
    assert call(server, "record_reference", "base", TEXT, on_window=windows.append, **settings).complete
    assert [window.index for window in windows] == [0, 1, 2], "each once"
    first, second = server.requests
    assert first == second
    sent = ReferenceRequest.model_validate(first[2])
    assert (sent.name, sent.prompt, sent.stream, sent.model) == ("base", TEXT, True, "m")
    assert len(waits) == 1


def test_references_are_listed_looked_up_and_deleted(call, server):
    assert [reference.name for reference in call(server, "references")] == ["base"]
    assert call(server, "reference", "base").fingerprint == FINGERPRINT
    assert call(server, "delete_reference", "base") is None
    assert call(server, "references") == []
    for method in ("reference", "delete_reference"):
        server = Outcomes(error(404, "no such reference"))
        with pytest.raises(scoremode.NotFoundError, match="no such reference"):
            call(server, method, "a/b?c")
        assert server.requests[0].url.raw_path == b"/v1/references/a%2Fb%3Fc"


def test_some_windows_and_top_tokens_can_be_requested(call, server):
    result = call(server, "kld", "base", (1, 2), top_logprobs=2, model="m")
    assert KldRequest.model_validate(server.requests[0][2]).model_dump() == {
        "model": "m",
        "reference": "base",
        "windows": [1, 2],
        "top_logprobs": 2,
        "statistics": [],
        "encoding_format": "base64",
        "as_noise_floor": False,
        "stream": True,
        "from_boundary": None,
        "routes": None,
        "lane": "prefill",
        "context": None,
    }
    [window] = result.data
    assert (result.windows, window.index) == ((1, 2), 1)
    assert window.top_logprobs.token_ids.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert window.top_logprobs.logprobs.tolist() == [[0, -0.125], [-0.125, -0.25], [-0.25, -0.375]]
    assert window.reference_top_logprobs.logprobs.tolist() == [[0, -0.25], [-0.25, -0.5], [-0.5, -0.75]]
    result = call(server, "kld", "base", on_window=(seen := []).append)
    ends = [[window.index for window in windows] for windows in (seen, result.data)]
    assert ends == [[2, 1, 0], [0, 1, 2]], "reported as they end, given in order"


def parse(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data:one\n\n", [b"one"]),
        (b"data: one\r\rdata: two\r\r:", [b"one", b"two"]),
        (b": keep-alive\n\nevent: window\nid: 7\nretry: 3\ndata: one\n\n", [b"one"]),
        (b"data: one\n", []),
        ("data: a\u2028b\x85c\n\n".encode(), ["a\u2028b\x85c".encode()]),
    ],
)
def test_events_are_read_as_the_standard_says(stream, expected):
    assert parse(stream) == expected


@given(st.data(), st.sampled_from([b"\n", b"\r\n"]))
def test_chunk_boundaries_do_not_matter(data, line_end):
    stream = line_end.join([b": hello", "data: é€".encode(), b"", b"data: two", b"data: lines", b"", b""])
    cuts = sorted(data.draw(st.sets(st.integers(min_value=1, max_value=len(stream) - 1))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*chunks) == ["é€".encode(), b"two\nlines"]


@pytest.mark.parametrize("prompt", [5, 0, None, [[5.0]], ["text", 5]])
def test_a_prompt_that_is_no_text_is_told(call, prompt):
    with pytest.raises(TypeError, match="is not a text, the token ids of one, or a list of either"):
        call(FakeServer(), "score", prompt)


def test_a_client_shows_its_server_without_the_password():
    client = scoremode.ScoreClient("http://user:secret@host:8000/v1", model="m")
    assert repr(client) == "ScoreClient('http://host:8000', model='m')"
    assert repr(scoremode.AsyncScoreClient("http://host")) == "AsyncScoreClient('http://host')"


@pytest.mark.parametrize("route", ["score", "perplexity", "kld/", "chat/completions"])
def test_an_address_that_ends_in_a_route_is_told_the_servers(route):
    with pytest.raises(ValueError, match=r"ends in a route: give the server's address, http://host:8000/below$"):
        scoremode.ScoreClient(f"http://host:8000/below/v1/{route}")
    # Proxies serve below paths of any name.
    assert scoremode.ScoreClient("http://host/v1/endpoints/score/v1/").base_url == "http://host/v1/endpoints/score"
