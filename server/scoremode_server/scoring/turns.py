"""Lets the event loop write answers and read new requests by turns."""

import asyncio

ANSWERS_AT_ONCE = 12
"""Answers that are written, each in about a millisecond, before the event loop reads new requests."""

WRITTEN_AT_ONCE = 32_768
"""Logprobs that are written as JSON without a break, in some ten milliseconds."""


class Turns:
    """Lets a few tasks continue at once, first come, first served, and new requests be read before the next ones.

    The engine finishes many requests in one step, and would wait while all of them are answered.
    """

    def __init__(self, at_once: int = ANSWERS_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        """Wait for a turn, which lasts until the caller next awaits something."""
        async with self._places:
            await asyncio.sleep(0)
