"""What is sent again, how often and after how long."""

import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from fake_scoremode import INFO, copy_of, error, events, result_event, serve, window_event

from local_server import reserved_port
from scoremode import (
    APIStatusError,
    NotFoundError,
    RateLimitError,
    ScoreClient,
    ServerError,
    TransportError,
    _retries,
)
from scoremode._retries import LONGEST_BACKOFF, RETRIES_OF_INTERNAL_ERRORS

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
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(TransportError, match=url):
            call(url, "info", client={"max_retries": 1})
    assert len(waits) == 1


DOWN = httpx.ConnectError("refused")
PATIENT = {"retry_for": 100}


@pytest.mark.parametrize(
    "failure",
    [DOWN, httpx.ReadError("reset"), error(429, "busy"), error(502, "bad"), error(503, "down"), error(504, "slow")],
    ids=repr,
)
def test_with_retry_for_a_restart_is_waited_out(call, waits, clock, failure):
    server = Server(*[failure] * 10, OK)
    assert call(server, "info", client=PATIENT).model == "bytes"
    assert len(waits) == 10, "more often than max_retries"
    assert max(waits) <= LONGEST_BACKOFF


def test_after_retry_for_the_failure_is_raised(call, waits, clock):
    with pytest.raises(TransportError, match="refused"):
        call(Server(DOWN), "info", client=PATIENT)
    assert sum(waits) == pytest.approx(100), "the last attempt is when the time is up"


def test_each_request_has_its_own_time(waits, clock):
    down_for_a_minute = httpx.Response(503, headers={"Retry-After": "60"})
    server = Server(down_for_a_minute, OK, down_for_a_minute, OK)
    with ScoreClient("http://fake", transport=httpx.MockTransport(server), retry_for=100) as client:
        assert [client.info().model, client.info().model] == ["bytes", "bytes"]
    assert waits == [60, 60]


def test_an_internal_error_that_stays_ends_after_a_few_attempts_for_the_server_is_alive(call, waits, clock):
    server = Server(error(500, "the model computed NaN"))
    with pytest.raises(ServerError, match="NaN"):
        call(server, "info", client=PATIENT)
    assert server.num_requests == 1 + RETRIES_OF_INTERNAL_ERRORS
    assert sum(waits) > 5, "vLLM looks every 5 seconds whether its engine is dead"


def test_internal_errors_of_a_server_that_dies_and_comes_back_are_waited_out(call, waits, clock):
    dying = [error(500, "EngineDeadError")] * 3
    assert call(Server(*dying, *[DOWN] * 9, OK), "info", client=PATIENT).model == "bytes"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_with_retry_for_requests_at_fault_fail_at_once(call, waits, clock, status):
    server = Server(error(status, "no"), OK)
    with pytest.raises(APIStatusError):
        call(server, "info", client=PATIENT)
    assert (server.num_requests, waits) == (1, [])


def test_retry_after_is_honoured_as_far_as_retry_for_goes(call, waits, clock):
    busy = httpx.Response(429, headers={"Retry-After": "90"})
    call(Server(busy, OK), "info", client=PATIENT)
    assert waits == [90.0]
    with pytest.raises(RateLimitError):
        call(Server(busy, busy, OK), "info", client=PATIENT)
    assert waits == [90.0, 90.0], "another 90 seconds would be too much"


def test_no_patience_at_all(call, waits, clock):
    server = Server(DOWN, OK)
    with pytest.raises(TransportError):
        call(server, "info", client={"retry_for": 0})
    assert (server.num_requests, waits) == (1, [])


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger="scoremode")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "scoremode._retries"]


def test_one_line_when_waiting_begins_and_one_when_it_ends(call, waits, clock, lines):
    call(Server(*[DOWN] * 10, OK), "info", client=PATIENT)
    begin, end = lines()
    assert begin == "waiting for http://fake:8000, 100 s at most: no answer from http://fake:8000/v1/score: refused"
    assert end.startswith("http://fake:8000 answers again after ")


def test_a_connection_that_an_idle_server_dropped_is_no_news(call, waits, clock, lines):
    call(Server(DOWN, OK), "info", client=PATIENT)
    assert lines() == []


class Waiting:
    """Requests of one client, each of which fails, pauses and ends when it is told."""

    def __init__(self):
        self.retries = _retries.Retries("http://fake", 0, 100)

    def request(self):
        return _retries.Attempts(self.retries).__enter__()

    def fail(self, attempts, status=503):
        response = error(status, "down")
        response.request = httpx.Request("GET", "http://fake/v1/score")
        attempts.wait_after_status(response)


def test_requests_that_wait_together_are_one_line(lines):
    client = Waiting()
    first, second = client.request(), client.request()
    for attempts in (first, second, first, second, first, second):
        client.fail(attempts)
    assert len(lines()) == 1
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert len(lines()) == 2


def test_a_second_outage_is_reported_though_a_request_still_waits_since_the_first(lines):
    client = Waiting()
    first, second = client.request(), client.request()
    for attempts in (first, second, first, second):
        client.fail(attempts)
    first.__exit__(None, None, None)
    client.fail(second)
    assert [line.split()[0] for line in lines()] == ["waiting", "http://fake", "waiting"]


def test_a_busy_server_is_reported_once_while_requests_take_turns(lines):
    client = Waiting()
    first, second = client.request(), client.request()
    for attempts in (first, second, first, second):
        client.fail(attempts, status=429)
    first.__exit__(None, None, None)
    client.fail(second, status=429)
    assert len(lines()) == 2


def test_a_request_that_is_given_up_is_no_answer(lines):
    client = Waiting()
    attempts = client.request()
    for _ in range(2):
        client.fail(attempts)
    attempts.__exit__(ServerError, ServerError("down", status_code=503), None)
    assert len(lines()) == 1
