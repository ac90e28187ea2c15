"""Whose turn it is on the event loop: answers that are ready, and requests that have just come."""

import asyncio

ANSWERS_AT_ONCE = 12
"""Answers that are written, each in about a millisecond, before the event loop looks for new requests. Fewer make steps
of the engine that are too small to be worth their launch."""


class Turns:
    """Lets a few tasks go on at once, first come, first served, and what has arrived meanwhile before the next ones.

    The engine finishes many requests in one step. Were all of them answered at once, it would have nothing to do
    meanwhile, and the API server nothing in its next step: requests in flight would go to and fro together.
    """

    def __init__(self, at_once: int = ANSWERS_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def take(self) -> None:
        """Wait for a turn, which lasts until the caller waits for something else."""
        async with self._places:
            await asyncio.sleep(0)
