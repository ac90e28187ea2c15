"""In-flight requests, by the blocks of rows that they compute. Other requests wait for them, but only for requests that
were registered earlier, so there is no deadlock.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request from `register` to `release`."""

    block_hashes: Sequence[bytes]
    num_columns: int
    """Of its rows."""
    blocks: Mapping[bytes, bytes] = field(default_factory=dict)
    """After the release, the blocks that it found or computed; none if it failed."""
    released: asyncio.Event = field(default_factory=asyncio.Event)


class InFlightRequests:
    """Which request computes which block. Waiting requests hold the request itself, so an eviction does not matter."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def register(self, request: InFlightRequest, found: Collection[bytes] = ()) -> dict[bytes, InFlightRequest]:
        """Register `request` for its blocks that were not `found` and that no other request computes with as many
        columns. Returns the requests that compute the others."""
        earlier = {}
        for block_hash in request.block_hashes:
            if block_hash in found:
                continue
            other = self._by_hash.get(block_hash)
            if other is not None and other.num_columns >= request.num_columns:
                earlier[block_hash] = other
            else:
                self._by_hash[block_hash] = request
        return earlier

    def release(self, request: InFlightRequest) -> None:
        """Remove a request and wake those that wait for it, whether it succeeded or not."""
        for block_hash in request.block_hashes:
            if self._by_hash.get(block_hash) is request:
                del self._by_hash[block_hash]
        request.released.set()
