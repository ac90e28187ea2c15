"""Clients send the right failed requests again, as often and after as long as they should."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from fake_server import INFO, CutShort, Outcomes, error, events, result_event, window_event

from scoremode import APIStatusError, NotFoundError, RateLimitError, ServerError, TransportError
from scoremode.runs import patient_client
from scoremode.wire.retries import FIRST_CONTACT_SECONDS, LONGEST_BACKOFF, RETRIES_OF_INTERNAL_ERRORS

OK = httpx.Response(200, json=INFO)
DOWN = httpx.ConnectError("refused")
PATIENT = {"retry_for": 100}


def asks_to_wait(value: str, status: int = 429) -> httpx.Response:
    return httpx.Response(status, headers={"Retry-After": value})


@pytest.mark.parametrize(
    "failure",
    [
        *(error(status, "busy or down") for status in (429, 502, 503, 504)),
        *(DOWN, httpx.ConnectTimeout("no route"), httpx.ReadError("reset"), httpx.RemoteProtocolError("disconnected")),
    ],
    ids=repr,
)
def test_passing_failures_are_retried(call, waits, clock, failure):
    server = Outcomes(failure, failure, OK)
    assert call(server, "info").model == "bytes"
    assert (len(server.requests), len(waits)) == (3, 2)
    waits.clear()
    assert call(Outcomes(*[failure] * 10, OK), "info", client=PATIENT).model == "bytes"
    assert len(waits) == 10, "more often than max_retries"
    assert max(waits) <= LONGEST_BACKOFF


@pytest.mark.parametrize("client", [{}, PATIENT], ids=["max_retries", "retry_for"])
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (error(404, "The model does not exist"), NotFoundError),
        (error(413, "too large"), APIStatusError),
        (httpx.ReadTimeout("slow"), TransportError),
        (httpx.LocalProtocolError("bad header"), TransportError),
        (asks_to_wait("3600"), RateLimitError),
    ],
    ids=repr,
)
def test_lasting_failures_and_very_busy_servers_are_not_retried(call, waits, clock, client, failure, kind):
    server = Outcomes(failure, OK)
    with pytest.raises(kind):
        call(server, "info", client=client)
    assert (len(server.requests), waits) == (1, [])


@pytest.mark.parametrize(("failure", "kind"), [(error(429, "busy"), RateLimitError), (DOWN, TransportError)], ids=repr)
def test_after_max_retries_the_last_failure_is_raised(call, waits, failure, kind):
    server = Outcomes(failure)
    with pytest.raises(kind, match=r"busy|refused"):
        call(server, "info", client={"max_retries": 7})
    assert len(server.requests) == 8
    for wait, longest in zip(waits, [0.5, 1, 2, 4, 8, LONGEST_BACKOFF, LONGEST_BACKOFF], strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(waits)) == len(waits), "by chance"


def test_a_reference_is_waited_for_as_long_as_others_compare_with_another(call, waits):
    """However often the server says so. `tests/unit/server/references/test_references_under_load.py` has its answer."""
    in_use = httpx.Response(
        429, headers={"Retry-After": "2"}, json={"error": {"message": "later", "param": "reference"}}
    )
    assert call(Outcomes(*[in_use] * 50, OK), "info").model == "bytes"
    assert waits == [2] * 50


@pytest.mark.parametrize(
    ("value", "shortest", "longest"),
    [
        ("17", 17, 17),
        (format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True), 86_400 - 3_600, 86_400),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("soon", 0.25, 0.5),
    ],
    # Two workers that collect tests in two different seconds would give a test two names.
    ids=["seconds", "in a day", "in the past", "not a time"],
)
def test_retry_after_decides_the_wait(call, waits, clock, value, shortest, longest):
    call(Outcomes(asks_to_wait(value), OK), "info", client={"retry_for": 100_000})
    assert shortest <= waits[0] <= longest


WINDOW = window_event(0, 2, [1.0], total_scored=1, perplexity=2.7)


def test_a_stream_is_restarted_until_it_has_reported_a_window(call, waits):
    whole, windows = httpx.Response(200, content=events(WINDOW, result_event())), []
    server = Outcomes(CutShort([]), whole)
    call(server, "perplexity", "text", on_window=windows.append)
    assert (len(server.requests), len(windows)) == (2, 1)
    server = Outcomes(CutShort([WINDOW]), whole)
    with pytest.raises(TransportError, match="connection lost"):
        call(server, "perplexity", "text", on_window=windows.append)
    assert (len(server.requests), len(windows)) == (1, 2)


def test_errors_do_not_show_the_password_in_the_address(call, waits):
    with pytest.raises(TransportError, match=r"^no answer from http://fake/v1/score: refused$"):
        call(Outcomes(DOWN), "info", client={"base_url": "http://me:secret@fake"})


@pytest.mark.parametrize("seconds", [0, 100])
def test_after_retry_for_the_failure_is_raised(call, waits, clock, seconds):
    with pytest.raises(TransportError, match="refused"):
        call(Outcomes(DOWN), "info", client={"retry_for": seconds})
    assert sum(waits) == pytest.approx(seconds), "the last attempt is when the time is up"


async def test_a_server_that_has_not_answered_yet_is_waited_for_less_and_with_a_hint(waits, clock):
    async with patient_client("http://fake", transport=httpx.MockTransport(Outcomes(DOWN))) as client:
        with pytest.raises(TransportError, match="refused; has a server been started there"):
            await client.info()
    assert sum(waits) == pytest.approx(FIRST_CONTACT_SECONDS)


def test_an_internal_error_is_retried_a_few_times(call, waits, clock):
    dying = Outcomes(*[error(500, "EngineDeadError")] * 3, *[DOWN] * 9, OK)
    assert call(dying, "info", client=PATIENT).model == "bytes"
    waits.clear()
    server = Outcomes(error(500, "the model computed NaN"))
    with pytest.raises(ServerError, match="NaN"):
        call(server, "info")
    assert len(server.requests) == 1, "without retry_for"
    with pytest.raises(ServerError, match="NaN"):
        call(server, "info", client=PATIENT)
    assert len(server.requests) == 2 + RETRIES_OF_INTERNAL_ERRORS
    assert sum(waits) > 5, "vLLM looks every 5 seconds whether its engine is dead"
