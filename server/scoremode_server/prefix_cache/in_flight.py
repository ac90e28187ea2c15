"""In-flight requests, by the blocks of rows that they compute.

Others wait for them. No circle of waiting requests can arise: a request waits only for those registered before it.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request from when it is registered until it is released."""

    block_hashes: Sequence[bytes]
    num_columns: int
    """Of its rows."""
    blocks: Mapping[bytes, bytes] = field(default_factory=dict)
    """The blocks that it found or computed, once it is released; none if it failed."""
    released: asyncio.Event = field(default_factory=asyncio.Event)


class InFlightRequests:
    """Which request computes which block. Waiters hold the request itself, so an eviction does not matter to them."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, InFlightRequest] = {}

    def __len__(self) -> int:
        """Blocks that are being computed."""
        return len(self._by_hash)

    def register(self, request: InFlightRequest, found: Collection[bytes] = ()) -> dict[bytes, InFlightRequest]:
        """Let `request` compute its blocks that were not `found` and that no other computes with as many columns; the
        requests that compute the others."""
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
        """Remove all of its blocks and wake the requests that wait for it, whether it succeeded or not."""
        for block_hash in request.block_hashes:
            if self._by_hash.get(block_hash) is request:
                del self._by_hash[block_hash]
        request.released.set()
