"""What is sent again, how often and after how long."""

import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from fake_scoremode import INFO, copy_of, error, events, result_event, serve, window_event

from scoremode import NotFoundError, RateLimitError, ServerError, TransportError
from scoremode._retries import LONGEST_BACKOFF

OK = httpx.Response(200, json=INFO)


class Server:
    """Plays one outcome after the other, answers or exceptions; the last one again and again."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.num_requests = 0

    def __call__(self, request):
        outcome = self.outcomes[min(self.num_requests, len(self.outcomes) - 1)]
        self.num_requests += 1
        if isinstance(outcome, Exception):
            outcome.request = request
            raise outcome
        return copy_of(outcome)


@pytest.mark.parametrize(
    "failure",
    [
        error(429, "busy"),
        error(502, "bad gateway"),
        error(503, "starting"),
        error(504, "gateway timeout"),
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("no route"),
        httpx.ReadError("connection reset"),
        httpx.RemoteProtocolError("server disconnected"),
    ],
    ids=repr,
)
def test_passing_failures_are_tried_again(call, waits, failure):
    server = Server(failure, failure, OK)
    assert call(server, "info").model == "bytes"
    assert (server.num_requests, len(waits)) == (3, 2)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (error(404, "The model does not exist"), NotFoundError),
        (error(500, "the engine died"), ServerError),
        (httpx.ReadTimeout("slow"), TransportError),
        (httpx.LocalProtocolError("bad header"), TransportError),
    ],
    ids=repr,
)
def test_lasting_failures_are_not(call, waits, failure, kind):
    server = Server(failure, OK)
    with pytest.raises(kind):
        call(server, "info")
    assert (server.num_requests, waits) == (1, [])


@pytest.mark.parametrize(
    ("failure", "kind"), [(error(429, "busy"), RateLimitError), (httpx.ConnectError("refused"), TransportError)]
)
def test_after_max_retries_the_last_failure_is_raised(call, waits, failure, kind):
    server = Server(failure)
    with pytest.raises(kind, match=r"busy|refused"):
        call(server, "info", client={"max_retries": 2})
    assert server.num_requests == 3


def test_waits_double_up_to_a_longest_and_are_jittered(call, waits):
    with pytest.raises(ServerError):
        call(Server(error(503, "down")), "info", client={"max_retries": 7})
    for wait, longest in zip(waits, [0.5, 1, 2, 4, 8, LONGEST_BACKOFF, LONGEST_BACKOFF], strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(waits)) == len(waits)


def test_retry_after_in_seconds_is_honoured(call, waits):
    busy = httpx.Response(429, headers={"Retry-After": "17"})
    call(Server(busy, OK), "info")
    assert waits == [17.0]


def test_retry_after_as_a_date_is_honoured(call, waits):
    until = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    call(Server(httpx.Response(503, headers={"Retry-After": until}), OK), "info")
    assert 20 < waits[0] <= 40


def test_retry_after_in_the_past_means_now(call, waits):
    past = httpx.Response(503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    call(Server(past, OK), "info")
    assert waits == [0.0]


def test_retry_after_that_says_nothing_is_ignored(call, waits):
    call(Server(httpx.Response(503, headers={"Retry-After": "soon"}), OK), "info")
    assert 0.25 <= waits[0] <= 0.5


def test_a_server_that_asks_for_an_hour_is_not_waited_for(call, waits):
    server = Server(httpx.Response(429, headers={"Retry-After": "3600"}), OK)
    with pytest.raises(RateLimitError):
        call(server, "info")
    assert (server.num_requests, waits) == (1, [])


class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __init__(self, start: bytes):
        self.start = start

    def __iter__(self):
        yield self.start
        raise httpx.ReadError("connection reset")

    async def __aiter__(self):
        for chunk in self:
            yield chunk


WINDOW = window_event(0, 2, [1.0], total_scored=1, perplexity=2.7)


def test_a_stream_lost_after_a_window_is_an_error_because_windows_would_be_reported_twice(call, waits):
    server = Server(httpx.Response(200, stream=Stream(events(WINDOW).removesuffix(b"data: [DONE]\n\n"))))
    windows = []
    with pytest.raises(TransportError, match="connection reset"):
        call(server, "perplexity", "text", on_window=windows.append)
    assert (server.num_requests, len(windows)) == (1, 1)


def test_a_stream_lost_before_the_first_window_is_asked_for_again(call, waits):
    server = Server(
        httpx.Response(200, stream=Stream(b": hello\n\n")),
        httpx.Response(200, content=events(WINDOW, result_event())),
    )
    windows = []
    call(server, "perplexity", "text", on_window=windows.append)
    assert (server.num_requests, len(windows)) == (2, 1)


def test_errors_do_not_tell_the_password_in_the_address(call, waits):
    with pytest.raises(TransportError) as caught:
        call(Server(httpx.ConnectError("refused")), "info", client={"base_url": "http://me:secret@fake"})
    assert "http://fake/v1/score" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_connection_that_a_real_server_drops_is_tried_again(call, waits):
    with serve(lambda request: copy_of(OK)) as url, socket.create_server(("127.0.0.1", 0)) as front:
        connections = []

        def drop_first_then_relay():
            first, _ = front.accept()
            first.recv(65536)
            first.close()
            connections.append("dropped")
            second, _ = front.accept()
            second.recv(65536)
            connections.append("answered")
            body = httpx.get(f"{url}/v1/score").content
            second.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            second.close()

        thread = threading.Thread(target=drop_first_then_relay)
        thread.start()
        info = call(f"http://127.0.0.1:{front.getsockname()[1]}", "info")
        thread.join()
    assert info.model == "bytes"
    assert connections == ["dropped", "answered"]


def test_a_refused_connection_says_where(call, waits):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(TransportError, match=url):
        call(url, "info", client={"max_retries": 1})
    assert len(waits) == 1
