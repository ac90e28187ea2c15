"""When a request is sent again, and how long to wait before: shared by the synchronous and the asynchronous client.

Scoring changes nothing on the server, so sending a request twice is harmless.
"""

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from scoremode._failures import status_error
from scoremode.errors import TransportError

RETRIED_STATUS_CODES = frozenset({429, 502, 503, 504})
RETRIED_ERRORS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Refused and dropped connections. A read timeout is not among them: the server is at work, and would start afresh."""

FIRST_WAIT = 0.5
LONGEST_BACKOFF = 8.0
LONGEST_RETRY_AFTER = 60.0
"""Seconds. A server that asks for more is not waited for."""


class Attempts:
    """The attempts of one request: after each that failed, the seconds to wait before the next, or the final error."""

    def __init__(self, max_retries: int) -> None:
        self._retries_left = max_retries
        self._backoff = FIRST_WAIT

    def wait_after_status(self, response: httpx.Response) -> float:
        """Seconds to wait after an error answer, whose body has been read.

        Raises:
            APIStatusError: trying again would not help, or was tried often enough.
        """
        asked_wait = _retry_after(response.headers.get("retry-after"))
        if (
            response.status_code not in RETRIED_STATUS_CODES
            or not self._retries_left
            or (asked_wait is not None and asked_wait > LONGEST_RETRY_AFTER)
        ):
            raise status_error(response.status_code, response.content, response.request.url.path)
        backoff = self._next_backoff()
        return backoff if asked_wait is None else asked_wait

    def wait_after_failure(self, error: httpx.RequestError, *, can_restart: bool) -> float:
        """Seconds to wait after a request without a whole answer.

        Raises:
            TransportError: trying again would not help, was tried often enough, or would repeat what was reported.
        """
        if not isinstance(error, RETRIED_ERRORS) or not self._retries_left or not can_restart:
            reason = str(error) or type(error).__name__
            url = error.request.url.copy_with(userinfo=b"")
            raise TransportError(f"no answer from {url}: {reason}") from error
        return self._next_backoff()

    def _next_backoff(self) -> float:
        self._retries_left -= 1
        longest = self._backoff
        self._backoff = min(2 * longest, LONGEST_BACKOFF)
        # Clients that failed together would otherwise come back together.
        return random.uniform(longest / 2, longest)


def _retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None where it says neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
