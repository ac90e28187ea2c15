"""Decides whether a request is sent again, and after how long, for the synchronous and the asynchronous client.

Sending a request twice is harmless: scoring changes nothing on the server, and a recording resumes. A second deletion
is answered with 404, and the reference stays deleted.
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
"""Refused and dropped connections. Read timeouts are not retried: the server is still computing, and a second request
would start over."""

RETRIES_OF_INTERNAL_ERRORS = 5
"""Retries of a status 500 with `retry_for`, over 8 to 16 seconds. vLLM answers 500 for up to 5 seconds after its engine
died, and then exits. A server that still answers 500 is alive and will do so again: the model computes NaN."""

RETRIES_OF_TIMEOUTS = 2
"""Retries of a request that ran into the server's `--request-timeout`: it will hardly be faster next time. A 504 of
another type comes from a proxy, whose server may be restarting."""

PATIENT_RETRY_FOR = 600.0
"""Default of `retry_for` in commands, whose runs take long; in seconds."""
FIRST_CONTACT_SECONDS = 120.0
"""Seconds that commands wait for a server that has not answered yet, without --retry-for."""
_FIRST_CONTACT_HINT = (
    "has a server been started there? vLLM takes minutes to load a large model: --retry-for 1800 waits half an hour"
)

FIRST_WAIT = 0.5
LONGEST_BACKOFF = 8.0


class Retries:
    """Limits on how often, or for how long, one client sends requests again. Logs when waiting begins and ends."""

    def __init__(self, address: str, max_retries: int, retry_for: float | None) -> None:
        self.max_retries = max_retries
        self.retry_for = retry_for
        """Keep retrying for this many seconds after a request's first failure, instead of counting `max_retries`."""
        self.grace: float | None = None
        """A lower limit than `retry_for`, in seconds, for a server that is down while others can take over its work. It
        does not apply to a busy server."""
        self.first_contact: float | None = None
        """A lower limit than `retry_for`, in seconds, for a server that has not answered yet: it may not exist."""
        self.raises_timeouts = False
        """Whether a 504 is raised at once, for callers that then send fewer requests at once. A change does not affect
        requests in flight."""
        self.num_failures = 0
        """Attempts that failed with a lost connection or a temporary 5xx; a busy server (429) does not count."""
        self.address = address
        self.waiting_since: float | None = None
        """Time at which the log said that requests wait; None once an answer came."""

    def limit(self, *, busy: bool) -> float | None:
        """Seconds after a request's first failure for which it is retried; None if `max_retries` applies instead."""
        if self.retry_for is None or busy:
            return self.retry_for
        return min(limit for limit in (self.grace, self.first_contact, self.retry_for) if limit is not None)


class Attempts(AbstractContextManager["Attempts"]):
    """The attempts of one request. After a failure, methods return the seconds to wait, or raise the final error."""

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
        """Seconds to wait after an error answer. APIStatusError if a retry would not help, or the limit is reached."""
        error = status_error(response.status_code, body, response.request.url.path)
        if response.status_code < INTERNAL_ERROR:
            self._retries.first_contact = None
        if response.status_code == TIMED_OUT and self._raises_timeouts:
            self._retries.num_failures += 1
            raise error
        if not self._is_passing(error):
            raise error
        asked_wait = _retry_after(response.headers.get("retry-after", ""))
        # A 429 about `reference` is not a failure: the server compares with another reference first, and that ends.
        if response.status_code != BUSY or error.param != "reference":
            self._num_failures += 1
        return self._wait(error, asked_wait, busy=response.status_code == BUSY)

    def wait_after_failure(self, error: httpx.RequestError, *, can_restart: bool) -> float:
        """Seconds to wait after a request without a complete answer. TransportError if a retry would not help or would
        report windows twice, or the limit is reached."""
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
            # Without `retry_for`, do not wait if the server asks for more seconds than this.
            longest = 60.0
            is_over = self._num_failures > retries.max_retries
        else:
            longest = self._first_failure + limit - now
            is_over = longest <= 0
        if is_over or (asked_wait is not None and asked_wait > longest):
            raise error
        if asked_wait is None:
            # The wait is random, so clients that failed at the same time do not all return at the same time.
            wait = min(random.uniform(self._backoff / 2, self._backoff), longest)
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
        else:
            wait = asked_wait
        patience = f"{retries.max_retries} times" if limit is None else f"{limit:g} s"
        if self._num_internal_errors or self._num_timeouts:
            patience = f"{RETRIES_OF_INTERNAL_ERRORS if self._num_internal_errors else RETRIES_OF_TIMEOUTS} times"
        # Log this once for all waiting requests, and not for a first, short pause.
        if retries.waiting_since is None and wait > FIRST_WAIT:
            retries.waiting_since = now
            _log.info("waiting for %s, %s at most: %s", retries.address, patience, error)
        return wait


def _retry_after(header: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None if it is neither."""
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header).astimezone(UTC)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
