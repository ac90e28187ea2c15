"""The order in which the event loop writes answers and reads new requests."""

import asyncio

ANSWERS_AT_ONCE = 12
"""Answers that are written, each in about a millisecond, before the event loop looks for new requests. With fewer,
steps of the engine are too small to be worth their launch."""

WRITTEN_AT_ONCE = 32_768
"""Logprobs, the likeliest of each position among them, that are written as JSON in one go: in some ten milliseconds."""


class Turns:
    """Lets a few tasks continue at once, first come, first served, and reads what has arrived before the next ones.

    The engine finishes many requests in one step. If all of them were answered at once, the engine would have nothing
    to do meanwhile, and the API server nothing during the next step. docs/decisions.md has the rates with and without
    turns.
    """

    def __init__(self, at_once: int = ANSWERS_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        """Wait for a turn, which lasts until the caller waits for something else."""
        async with self._places:
            await asyncio.sleep(0)
