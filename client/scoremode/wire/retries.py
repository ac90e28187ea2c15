"""When a request is sent again, and how long to wait before: shared by the synchronous and the asynchronous client.

Sending a request twice is harmless: scoring changes nothing on the server, a recording resumes, and what
was deleted stays so, even if the second answer is then that it is not found.
"""

import logging
import random
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic

import httpx

from scoremode.errors import APIStatusError, ScoremodeError, TransportError
from scoremode.wire.failures import status_error

_log = logging.getLogger(__name__)

BUSY = 429
INTERNAL_ERROR = 500
TIMED_OUT = 504
RETRIED_STATUS_CODES = frozenset({BUSY, 502, 503, TIMED_OUT})
RETRIED_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Refused and dropped connections. A read timeout is not among them: the server is at work, and would start afresh."""

RETRIES_OF_INTERNAL_ERRORS = 5
"""With `retry_for`: 8 to 16 seconds. vLLM answers 500 for up to 5 after its engine died, and then goes away. A server
that still answers 500 after that is alive and will do so again, as it does where the model computes NaN."""

RETRIES_OF_TIMEOUTS = 2
"""Of a request that the server gave up after its `--request-timeout`: it works, and will hardly be faster later. A 504
of another type is a proxy's, whose server may be restarting."""

PATIENT_RETRY_FOR = 600.0
"""Seconds: `retry_for` of commands, whose runs take long."""
FIRST_CONTACT_SECONDS = 120.0
"""How long commands wait for a server that has not answered yet, unless --retry-for says how long."""
_FIRST_CONTACT_HINT = (
    "is a server started there? vLLM takes minutes to load a large model: --retry-for 1800 waits half an hour"
)

FIRST_WAIT = 0.5
LONGEST_BACKOFF = 8.0


class Retries:
    """How often, or for how long, the requests of one client are sent again. Logs when waiting begins and ends."""

    def __init__(self, address: str, max_retries: int, retry_for: float | None) -> None:
        self.max_retries = max_retries
        self.retry_for = retry_for
        """Seconds since a request's first failure, in place of `max_retries`."""
        self.grace: float | None = None
        """With `retry_for`: the seconds for a server that is down, where another can take over. A busy one has all."""
        self.first_contact: float | None = None
        """With `retry_for`: the seconds for a server that has answered no request yet; it may not be there at all."""
        self.raises_timeouts = False
        """Whether a 504 is raised at once, for callers that then have fewer requests in flight. Attempts that are under
        way keep what they began with."""
        self.num_failures = 0
        """Attempts that failed because the server was down; those that found it busy do not count."""
        self.address = address
        self.waiting_since: float | None = None
        """When the log showed that requests wait; None once an answer came."""

    def limit(self, *, busy: bool) -> float | None:
        """Seconds since a request's first failure; None where attempts are counted instead."""
        if self.retry_for is None or busy:
            return self.retry_for
        return min(limit for limit in (self.grace, self.first_contact, self.retry_for) if limit is not None)


class Attempts(AbstractContextManager["Attempts"]):
    """The attempts of one request: after each that failed, the seconds to wait before the next, or the final error."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_failures = 0
        self._num_internal_errors = 0
        self._num_timeouts = 0
        self._raises_timeouts = retries.raises_timeouts
        self._first_failure: float | None = None
        self._backoff = FIRST_WAIT

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        retries = self._retries
        if kind is None:
            retries.first_contact = None
            if self._first_failure is not None and retries.waiting_since is not None:
                _log.info("%s answers again after %.0f s", retries.address, monotonic() - retries.waiting_since)
                retries.waiting_since = None

    def wait_after_status(self, response: httpx.Response, body: bytes) -> float:
        """Seconds to wait after an error answer. APIStatusError if trying again would not
        help, or was tried often or long enough."""
        error = status_error(response.status_code, body, response.request.url.path)
        if response.status_code < INTERNAL_ERROR:
            self._retries.first_contact = None
        if response.status_code == TIMED_OUT and self._raises_timeouts:
            self._retries.num_failures += 1
            raise error
        if not self._is_passing(error):
            raise error
        asked_wait = _retry_after(response.headers.get("retry-after", ""))
        if response.status_code != BUSY or error.param != "reference":
            self._num_failures += 1
        # Else other clients compare with another reference, which ends however long their windows take.
        return self._wait(error, asked_wait, busy=response.status_code == BUSY)

    def wait_after_failure(self, error: httpx.RequestError, *, can_restart: bool) -> float:
        """Seconds to wait after a request without a whole answer. TransportError if trying again would not help, was
        tried often or long enough, or would repeat what was reported."""
        url = error.request.url.copy_with(userinfo=b"")
        hint = "" if self._retries.first_contact is None else f"; {_FIRST_CONTACT_HINT}"
        failure = TransportError(f"no answer from {url}: {str(error) or type(error).__name__}{hint}")
        failure.__cause__ = error
        if not isinstance(error, RETRIED_ERRORS) or not can_restart:
            raise failure
        self._num_failures += 1
        return self._wait(failure, None, busy=False)

    def _is_passing(self, error: APIStatusError) -> bool:
        if error.status_code == INTERNAL_ERROR and self._retries.retry_for is not None:
            self._num_internal_errors += 1
            return self._num_internal_errors <= RETRIES_OF_INTERNAL_ERRORS
        if error.type == "GatewayTimeoutError":
            self._num_timeouts += 1
            return self._num_timeouts <= RETRIES_OF_TIMEOUTS
        return error.status_code in RETRIED_STATUS_CODES

    def _wait(self, error: ScoremodeError, asked_wait: float | None, *, busy: bool) -> float:
        retries = self._retries
        if not busy:
            retries.num_failures += 1
        now = monotonic()
        if self._first_failure is None:
            self._first_failure = now
        limit = retries.limit(busy=busy)
        if limit is None:
            # The client does not wait for a server that asks for more, unless `retry_for` allows it.
            longest = 60.0
            is_over = self._num_failures > retries.max_retries
        else:
            longest = self._first_failure + limit - now
            is_over = longest <= 0
        if is_over or (asked_wait is not None and asked_wait > longest):
            raise error
        if asked_wait is None:
            # Clients that failed together would otherwise come back together.
            wait = min(random.uniform(self._backoff / 2, self._backoff), longest)
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
        else:
            wait = asked_wait
        patience = f"{retries.max_retries} times" if limit is None else f"{limit:g} s"
        if self._num_internal_errors or self._num_timeouts:
            patience = f"{RETRIES_OF_INTERNAL_ERRORS if self._num_internal_errors else RETRIES_OF_TIMEOUTS} times"
        # Once for all requests that wait, and not for a first, short pause.
        if retries.waiting_since is None and wait > FIRST_WAIT:
            retries.waiting_since = now
            _log.info("waiting for %s, %s at most: %s", retries.address, patience, error)
        return wait


def _retry_after(header: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None where it says neither."""
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header).astimezone(UTC)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
