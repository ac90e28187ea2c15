"""Requests in flight, by the blocks of rows that they are computing.

Others wait for them, and nobody waits in a circle: a request waits for flights that took off before it, and for
flights that run alone, which wait for nobody.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way."""

    width: int
    """Columns that its rows have."""
    keys: Sequence[bytes]
    """Its chain of blocks."""
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    """Its blocks once it has landed; none if it failed."""
    alone: bool = False
    """It computes all of its blocks now, and waits for nobody."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Flights:
    """Which flight computes which block. Waiters hold the flight itself, so that no eviction comes between."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def take_off(self, flight: Flight, keys: Iterable[bytes]) -> dict[bytes, Flight]:
        """Let `flight` compute the blocks that no other computes with as many columns; the flights of the others."""
        earlier = {}
        for key in keys:
            other = self._by_key.get(key)
            if other is not None and other.width >= flight.width:
                earlier[key] = other
            else:
                self._by_key[key] = flight
        return earlier

    def alone(self, keys: Iterable[bytes], width: int) -> Flight | None:
        """A flight that runs alone and computes one of the blocks with at least `width` columns."""
        flights = map(self._by_key.get, keys)
        return next((flight for flight in flights if flight and flight.alone and flight.width >= width), None)

    def land(self, flight: Flight) -> None:
        """Let go of all blocks and wake every waiter, whatever became of the flight."""
        for key in flight.keys:
            if self._by_key.get(key) is flight:
                del self._by_key[key]
        flight.landed.set()
