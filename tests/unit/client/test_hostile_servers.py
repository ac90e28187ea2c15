"""A hostile or broken server answers at any length and depth, and with values that no model gives."""

import base64
import math
import socket
import threading
from contextlib import suppress

import httpx
import pytest
from fake_server import (
    BOS,
    Chunks,
    FakeServer,
    Outcomes,
    changed,
    encoded,
    events,
    ok,
    result_event,
    window_event,
)

from scoremode import APIStatusError, BadRequestError, ResponseError, ScoreClient, TransportError
from scoremode._texts import MAX_SHOWN
from scoremode.wire.protocol import ROUNDING

MESSAGES = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
REQUESTS = {
    "info": ((), {}),
    "score": (([[BOS, 1]],), {"top_logprobs": 5}),
    "tokenize": (("text",), {}),
    "detokenize": (([1],), {}),
    "token_texts": (([1],), {}),
    "turns": ((MESSAGES,), {}),
    "perplexity": (("text",), {}),
    "record_reference": (("base", "text"), {}),
    "references": ((), {}),
    "reference": (("base",), {}),
    "reference_windows": (("base",), {}),
    "kld": (("base", (0, 1)), {"num_positions": 511}),
}
"""One request of a few bytes for every method that reads an answer."""
MOST_MIB = {"references": 64, "reference": 4, "reference_windows": 4}
"""The length of these answers depends on what a server has. A client reads the reference before its windows."""


def endless(status: int = 200, chunk: bytes = b" " * 65_536, **headers: str) -> Chunks:
    """An answer without an end, as far as a test can tell."""
    return Chunks([chunk] * (2**27 // len(chunk)), status, **headers)


@pytest.mark.parametrize("chunk", [b" " * 65_536, b": waiting\n\n" * 6000, b'data: {"object": "a\n' * 3000])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("method", REQUESTS)
def test_an_endless_answer_is_read_as_far_as_the_request_can_bring(call, method, status, chunk):
    response, (arguments, fields) = endless(status, chunk), REQUESTS[method]
    with pytest.raises(ResponseError, match="longer than the"):
        call(Outcomes(response), method, *arguments, **fields)
    assert response.num_sent < (MOST_MIB.get(method, 1) + 1) * 2**20


EARLY, CHUNKED = b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class RawServer:
    """Answers every request with bytes as they are, and with one of them again and again, up to 64 MiB."""

    def __init__(self, start: bytes, again: bytes = b"") -> None:
        self.start, self.again, self.num_sent, self.num_connections = start, again, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.num_connections += 1
            with connection, suppress(OSError):
                while connection.recv(65_536):
                    connection.sendall(self.start)
                    while self.again and self.num_sent < 2**26:
                        connection.sendall(self.again * (65_536 // len(self.again)))
                        self.num_sent += 65_536


@pytest.mark.parametrize(
    ("start", "again"),
    [
        *((b"", EARLY), (b"", b"HTTP/1.1 100 Continue\r\nX-A: %b\r\n\r\n" % (b"a" * 60_000))),
        *((b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"), (b"HTTP/1.1 200 OK\r\nX-A: ", b"a")),
        *((CHUNKED + b"5;", b"a"), (CHUNKED + b"0\r\n", b"X-A: b\r\n"), (CHUNKED, b"1;a=b\r\n \r\n")),
    ],
    ids=["103", "100", "headers", "header", "extension", "trailers", "chunks"],
)
def test_no_part_of_an_answer_is_endless(call, start, again):
    server = RawServer(start, again)
    with pytest.raises((ResponseError, TransportError)):
        call(server.url, "info", client={"max_retries": 0})
    # The client has read this much, with what the kernel holds.
    assert server.num_sent < 2**25


def test_the_longest_head_is_read_and_any_body_after_it(call):
    body = b"a" * 2**23
    head = b"HTTP/1.1 200 OK\r\nX-A: %b\r\nContent-Length: %d\r\n\r\n" % (b"a" * 90_000, len(body))
    server, chunks = RawServer(500 * EARLY + head + body), []
    for num_answers in (1, 2):
        call(server.url, "llama_cpp_base", "base", 0, chunks.append)
        assert sum(map(len, chunks)) == num_answers * len(body)


def test_a_connection_that_is_used_again_may_have_as_long_a_head_each_time():
    server = RawServer(30_000 * EARLY + b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n")
    with ScoreClient(server.url, max_retries=0) as client:
        for _ in range(6):
            with pytest.raises(BadRequestError):
                client.info()
    assert server.num_connections == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(call, status):
    server = Outcomes(httpx.Response(status, headers={"Location": "http://fake:8000/v1/score"}))
    with pytest.raises(APIStatusError):
        call(server, "info")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "message",
    ["a" * 500_000, ["\x1b[2J"] * 30_000, {"a": ["b"] * 100_000}, [[]] * 100_000],
    ids=["text", "list", "object", "lists"],
)
@pytest.mark.parametrize("where", ["message", "param", "type", "error", "detail"])
def test_an_error_shows_the_beginning_of_what_is_said(call, message, where):
    error = {"message": "no", where: message}
    content = {"error": message, "detail": message} if where in ("error", "detail") else {"error": error}
    if where == "detail":
        del content["error"]
    with pytest.raises(BadRequestError) as caught:
        call(Outcomes(httpx.Response(400, json=content)), "info")
    # An escape has four characters for one.
    for shown in (str(caught.value), caught.value.param, caught.value.type):
        assert shown is None or (len(shown) < 5 * MAX_SHOWN and shown.isprintable())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip"])
def test_a_compressed_answer_is_not_unpacked(call, encoding):
    response = endless(**{"Content-Encoding": encoding})
    server = Outcomes(response)
    with pytest.raises(ResponseError, match="is compressed"):
        call(server, "score", [[BOS, 1]])
    assert response.num_sent == 0
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


DEEP = b"[" * 100_000 + b"\n\n"


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        *((200, b"data: " + DEEP, ResponseError), (200, b'data: {"error": ' + DEEP, ResponseError)),
        *((400, DEEP, BadRequestError), (400, b"a\x1b[2J\nb", BadRequestError)),
        *((200, content, ResponseError) for content in (b"data: \x1b[2J\n\n", b"data: [DONE]\n\n")),
        (200, b'data: {"object": "perplexity"', ResponseError),
        *(
            (200, events(*items), ResponseError)
            for items in ([{"object": "perplexity"}, {"object": "kld"}], [{"object": "surprise"}])
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_stream_that_breaks_the_protocol_is_refused_in_one_short_line(call, status, content, error):
    with pytest.raises(error) as caught:
        call(Outcomes(httpx.Response(status, content=content)), "perplexity", "text")
    assert str(caught.value).isprintable()
    assert (len(str(caught.value)) < 500, r"\x1b" in str(caught.value)) == (True, b"\x1b" in content)


def floats(*values: float) -> str:
    return encoded(values, "<f4")


TOP = {"shape": [2, 1], "token_ids": encoded([-1, 1], "<i4"), "logprobs": floats(math.nan, -1)}
REFERENCE_TOP = {"shape": [3, 1], "token_ids": encoded([1, 2, 3], "<i4"), "logprobs": floats(-1, -1, -1)}


@pytest.mark.parametrize(
    "change",
    [
        *({"logprobs": logprobs} for logprobs in ("not base64!", floats(0))),
        *({"logprobs": floats(math.nan, value)} for value in (0.5, math.inf, math.nan)),
        *({"logprobs": floats(value, -1)} for value in (0.5, math.inf)),
        *({"sum_logprob": value} for value in (5.0, "NaN", "Infinity")),
        *({"ranks": ranks} for ranks in ([None, 0], [None, -1], [None], [None, 1, 1])),
        *({"token_ids": ids} for ids in ([BOS, 2], [BOS, -1], [BOS, 2**31])),
        *({name: value} for name, value in (("index", 1), ("tokens", ["a"]))),
        *({"top_logprobs": TOP | part} for part in ({"shape": [1, 2]}, {"logprobs": floats(math.nan, 0.5)})),
        *({"top_logprobs": TOP | {"shape": shape}} for shape in ([2], [2, 1, 1])),
        {"candidate_logprobs": [None, [-1.0]]},
        *({"candidate_logprobs": {"shape": [2, 1], "logprobs": floats(-1, value)}} for value in (0.5, math.nan)),
    ],
    ids=str,
)
def test_a_score_that_cannot_be_right_is_refused(call, change):
    server = changed(FakeServer(), "/v1/score", lambda content: content["data"][0].update(change))
    with pytest.raises(ResponseError):
        call(server, "score", [[BOS, 1]])


def test_rounding_may_leave_a_logprob_above_zero(call):
    values = floats(math.nan, ROUNDING / 2)
    server = changed(FakeServer(), "/v1/score", lambda content: content["data"][0].update(logprobs=values))
    assert call(server, "score", [[BOS, 1]])[0].logprobs[1] == pytest.approx(ROUNDING / 2)


@pytest.mark.parametrize(
    ("prompt", "continuations"),
    [("text", None), ([BOS, 1], None), ([[BOS]], ["a", "b"]), ([[BOS]], [["a"]]), ([[BOS], [1]], [[[7]], [[8]]])],
)
def test_there_is_one_score_for_each_text_that_was_sent(call, prompt, continuations):
    with pytest.raises(ResponseError, match="the server did not score what it was sent: it gave 0 scores for"):
        call(Outcomes(ok({"data": []})), "score", prompt, continuations)


WINDOW = window_event(0, 1, [1.0, 2.0], total_scored=2, perplexity=4.5)


@pytest.mark.parametrize(
    "change",
    [
        *({"perplexity": value} for value in (0.0, -2.0, 0.5, math.nan)),
        *({"nll_sum": value} for value in (math.nan, math.inf)),
        *({"index": value} for value in (1, -1)),
        *({"logprobs": values} for values in ([-1.0], [-1.0, 0.5], [-1.0, math.nan])),
        *({"ranks": values} for values in ([1, 0], [1])),
        *({name: 0} for name in ("num_windows", "num_scored", "total_scored")),
    ],
    ids=str,
)
def test_a_window_that_cannot_be_right_is_refused(call, change):
    stream = events({**WINDOW, **change}, result_event())
    with pytest.raises(ResponseError):
        call(Outcomes(httpx.Response(200, content=stream)), "perplexity", "text", on_window=print)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"logprobs": floats(-1, value, -1)}, "in the server's logprobs") for value in (0.5, math.inf)),
        ({"reference_logprobs": floats(-1, 0.5, -1)}, r"^0\.5 \(not from -inf to 0\.001\) in the server's ref"),
        ({"kld": floats(0, -0.5, 0)}, r"-0\.5 .* in the server's kld"),
        ({"reference_confidence": floats(1, 1.5, 1)}, "in the server's reference_confidence"),
        ({"ranks": encoded([1, 0, 1], "<i4")}, "0 .* in the server's ranks"),
        ({"token_ids": encoded([1, -1, 1], "<i4")}, "-1 .* in the server's token_ids"),
        ({"index": 1}, "did not compare the windows that it was asked for"),
        ({"ranks": base64.b64encode(b"12345").decode()}, "ranks are not int32 in base64"),
        ({"kld": [0.5, 0.5, 0.5]}, "kld are not float32 in base64"),
        ({"kld": floats(0, 0)}, "different shapes"),
        ({"kld": floats(0, math.nan, 0)}, "NaN in the server's kld"),
        ({"top_logprobs": {"shape": [3, 2], "token_ids": "", "logprobs": ""}}, r"not of shape \[3, 2\]"),
        # One side's alone would be taken for the other's.
        ({"reference_top_logprobs": REFERENCE_TOP}, "top_logprobs are not in base64"),
    ],
)
def test_a_comparison_that_cannot_be_right_is_refused(call, change, message):
    compared = FakeServer(noise=0.5)
    call(compared, "record_reference", "base", "Hello, world", method="disjoint", context_length=4)
    with pytest.raises(ResponseError, match=message):
        call(changed(compared, "/v1/kld", lambda answer: answer.update(change)), "kld", "base", (0, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"conversation": 1},
        {"conversation": -1},
        {"token_ids": [1, 2, -3]},
        *({"turns": [{"role": "assistant", "first": a, "end": b}]} for a, b in ((0, 2), (2, 2), (2, 4), (3, 2))),
    ],
    ids=str,
)
def test_turns_that_are_not_in_their_conversation_are_refused(call, change):
    sequence = {"conversation": 0, "token_ids": [1, 2, 3], "turns": [{"role": "assistant", "first": 1, "end": 3}]}
    server = [Outcomes(ok({"object": "turns", "data": [each]})) for each in (sequence, {**sequence, **change})]
    assert call(server[0], "turns", MESSAGES) == [sequence]
    with pytest.raises(ResponseError):
        call(server[1], "turns", MESSAGES)
