"""Requests in flight, by the blocks of rows that they are computing.

Others wait for them, and nobody waits in a circle: a request waits for flights that took off before it, and for
flights that run alone, which wait for nobody.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from scoremode_server.prefix_hash import Chain


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way."""

    width: int
    """Columns that its rows have."""
    chain: Chain
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    """Its blocks once it has landed; none if it failed, or if nobody knows it."""
    known: bool = False
    """It is listed under the keys of all blocks that it computes, so that others may wait for them; before anybody
    has asked for its first block, it is listed under that one's key only."""
    alone: bool = False
    """It computes all of its blocks now, and waits for nobody."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Flights:
    """Which flight computes which block. Waiters hold the flight itself, so that no eviction comes between."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def take_off(self, flight: Flight, found: Collection[bytes] = ()) -> dict[bytes, Flight]:
        """Let `flight` compute all blocks that were not `found` and that no other computes with as many columns; the
        flights of the others.

        A flight that found its first block, which was let go since, is not among them.
        """
        first = self._by_key.get(flight.chain.head)
        if first is None and not found:
            self._by_key[flight.chain.head] = flight
            return {}
        if first is not None and not first.known:
            self.compute(first, first.chain.keys)
        return self.compute(flight, [key for key in flight.chain.keys if key not in found])

    def compute(self, flight: Flight, keys: Iterable[bytes]) -> dict[bytes, Flight]:
        """Let `flight` compute the blocks under these keys that no other computes with as many columns; the flights of
        the others."""
        flight.known = True
        earlier = {}
        for key in keys:
            other = self._by_key.get(key)
            if other is not None and other is not flight and other.width >= flight.width:
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
        for key in flight.chain.keys if flight.known else (flight.chain.head,):
            if self._by_key.get(key) is flight:
                del self._by_key[key]
        flight.landed.set()
