"""Rows of logprobs in memory, by the tokens that they depend on. Data only: no engine, no event loop, no metrics.

A row is what scoring says of one token: its id and the ids of the top k, their logprobs, its rank. Rows are kept in
blocks of as many tokens as a block of the engine's KV cache, shifted by one: block b holds the rows of the tokens at
positions b*B+1 to (b+1)*B. When the engine reads m*B tokens from its prefix cache, the last hidden state that it does
not compute is the one at m*B-1, which predicts token m*B; so the rows that it leaves out are exactly m whole blocks.

The blocks of a sequence whose head nobody has asked for again are kept as one table, which costs little time to keep
and to let go; it is split when somebody asks.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from scoremode_server.prefix_hash import Chain, PrefixHash

ENTRY_BYTES = 384
"""Bytes that a block costs besides its rows: key, object headers, hash tables. As growth of resident memory with
CPython 3.11 it was 50 to 245 in caches that are filled, and up to 383 in full ones that let blocks go for others."""

WHOLE_BYTES = 1536
"""Bytes that a table of a whole chain costs besides its rows and tokens. As growth of resident memory with CPython 3.11
and numpy 2 it was 977 to 994 in caches that are filled, and up to 1,251 in full ones."""

_WORD_BYTES = 4


def pack(ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """A table of rows, [rows, 2 * width + 1] int32: ids [rows, width], the bits of float32 logprobs, ranks [rows]."""
    num_rows, width = ids.shape
    table = np.empty((num_rows, 2 * width + 1), np.int32)
    fill(table, ids, logprobs, ranks)
    return table


def fill(table: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> None:
    """Write rows into a table as `pack` makes it."""
    width = ids.shape[1]
    table[:, :width] = ids
    table[:, width : 2 * width].view(np.float32)[:] = logprobs
    table[:, -1] = ranks


def unpack(table: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and logprobs (nats) [rows, width], and ranks [rows]: the first `width` columns of a table of rows."""
    stored = table.shape[1] // 2
    return table[:, :width], table[:, stored : stored + width].view(np.float32), table[:, -1]


@dataclass(frozen=True, slots=True)
class Whole:
    """The rows of a chain that is not split into blocks."""

    chain: Chain
    table: np.ndarray
    """[rows, 2 * width + 1] int32 as `pack` makes it; rows behind the last whole block are of no use."""

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes + self.chain.token_ids.nbytes + WHOLE_BYTES


def _cost(entry: bytes | Whole) -> int:
    return entry.num_bytes if isinstance(entry, Whole) else len(entry) + ENTRY_BYTES


@dataclass(slots=True)
class CacheCounts:
    """What has happened since the start."""

    hits: int = 0
    """Tokens whose row was answered without computing it for the request."""
    misses: int = 0
    """Tokens whose row the engine computed for the request."""
    joined: int = 0
    """Requests that waited for the rows of another one in flight."""
    evictions: int = 0
    """Blocks dropped for want of room."""


class LogprobCache:
    """Blocks of rows, least recently used out first, at most `max_bytes` of them with their overhead; 0 turns it off.
    Those of a whole table go together.

    A block holds the columns that were computed: it answers requests for as many or fewer, and gives way to a wider
    one.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.counts = CacheCounts()
        self.num_bytes = 0
        self.generation = 0
        """Goes up whenever rows may have become wrong; rows computed in an earlier one are worth nothing."""
        self._hash = PrefixHash()
        self._entries: OrderedDict[bytes, bytes | Whole] = OrderedDict()
        self._num_changes = 0

    def __len__(self) -> int:
        """Blocks here."""
        wholes = (entry.chain.num_blocks - 1 for entry in self._entries.values() if isinstance(entry, Whole))
        return len(self._entries) + sum(wholes)

    @property
    def enabled(self) -> bool:
        """Whether rows may be taken and kept: never without a budget, nor while the weights are being changed."""
        return self.max_bytes > 0 and not self._num_changes

    def chain(self, token_ids: np.ndarray, *identity: Any) -> Chain:
        """The blocks of tokens [n] int32, by keys.

        `identity` is everything else that the logprobs depend on, anything with a faithful `repr`.
        """
        return Chain(self._hash, token_ids, self.block_size, repr((self.generation, identity)))

    def find(self, chain: Chain, width: int) -> dict[bytes, bytes]:
        """`get` of a chain's blocks; none where its first one is not here."""
        return self.get(chain.keys, width) if chain.head in self._entries else {}

    def get(self, keys: Sequence[bytes], width: int) -> dict[bytes, bytes]:
        """The blocks of a chain, its first one first, that are here with at least `width` columns; they become the most
        recently used."""
        found: dict[bytes, bytes] = {}
        self._split_whole(keys)
        wanted = self._block_bytes(width)
        for key in reversed(keys):
            block = self._entries.get(key)
            if isinstance(block, bytes) and len(block) >= wanted:
                self._entries.move_to_end(key)
                found[key] = block
        return found

    def put(self, generation: int, keys: Sequence[bytes], blocks: Mapping[bytes, bytes]) -> None:
        """Keep the computed blocks of a chain, unless they are of an earlier generation.

        The whole chain becomes the most recently used, its head more recent than its tail: a tail without its head is
        of no use.
        """
        if generation != self.generation or not self.enabled:
            return
        self._split_whole(keys)
        if self._entries.keys().isdisjoint(keys):
            self._put_new(keys, blocks)
            return
        for key in reversed(keys):
            block, kept = blocks.get(key), self._entries.get(key)
            if isinstance(kept, bytes) and (block is None or len(block) < len(kept)):
                self._entries.move_to_end(key)
            elif block is not None and self._make_room(key, len(block) + ENTRY_BYTES):
                self._entries[key] = block

    def put_whole(self, generation: int, chain: Chain, table: np.ndarray) -> None:
        """`put` of all blocks of a chain, in a table of their rows that from now on is the cache's."""
        if generation != self.generation or not self.enabled:
            return
        whole = Whole(chain, table)
        if chain.head in self._entries or whole.num_bytes > self.max_bytes:
            self.put(generation, chain.keys, self.split(chain.keys, table))
            return
        self._evict(whole.num_bytes)
        self._entries[chain.head] = whole
        self.num_bytes += whole.num_bytes

    def split(self, keys: Sequence[bytes], table: np.ndarray) -> dict[bytes, bytes]:
        """The blocks of a table that begins with their rows; it may have more."""
        step = self.block_size * table.strides[0]
        rows = table.tobytes()
        return {key: rows[index * step : (index + 1) * step] for index, key in enumerate(keys)}

    def _split_whole(self, keys: Sequence[bytes]) -> None:
        """Split the table that is kept under a chain's head, if it is kept so."""
        entry = self._entries.get(keys[0]) if keys else None
        if isinstance(entry, Whole):
            del self._entries[keys[0]]
            self.num_bytes -= entry.num_bytes
            self.put(self.generation, entry.chain.keys, self.split(entry.chain.keys, entry.table))

    def _put_new(self, keys: Sequence[bytes], blocks: Mapping[bytes, bytes]) -> None:
        """`put` of a chain of which nothing is here: as many of its first blocks as have room."""
        kept = [key for key in keys if key in blocks]
        costs = [0, *accumulate(len(blocks[key]) + ENTRY_BYTES for key in kept)]
        count = bisect_right(costs, self.max_bytes) - 1
        self.counts.evictions += len(kept) - count
        self._evict(costs[count])
        self._entries.update((key, blocks[key]) for key in reversed(kept[:count]))
        self.num_bytes += costs[count]

    def _make_room(self, key: bytes, cost: int) -> bool:
        """Take what is kept under a key out, and room for what comes in its place, so that the bound holds at every
        moment; False if it has no room even alone."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.num_bytes -= _cost(old)
        if cost > self.max_bytes:
            return False
        self._evict(cost)
        self.num_bytes += cost
        return True

    def _evict(self, cost: int) -> None:
        """Let go of what was not used for longest until so many bytes have room."""
        while self.num_bytes + cost > self.max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.num_bytes -= _cost(evicted)
            self.counts.evictions += evicted.chain.num_blocks if isinstance(evicted, Whole) else 1

    def clear(self) -> None:
        """Drop all rows, and begin a new generation."""
        self._entries.clear()
        self.num_bytes = 0
        self.generation += 1

    @contextmanager
    def change(self) -> Iterator[None]:
        """The weights change inside: no row survives it, and none is taken or kept meanwhile."""
        self.clear()
        self._num_changes += 1
        try:
            yield
        finally:
            self._num_changes -= 1
            self.clear()

    def columns(self, blocks: Sequence[bytes], width: int) -> np.ndarray:
        """A table of the rows of blocks, [len(blocks) * block size, 2 * width + 1] int32, narrowed to `width`."""
        num_bytes = self._block_bytes(width)
        fitting = [block if len(block) == num_bytes else self._narrow(block, width) for block in blocks]
        return np.frombuffer(b"".join(fitting), np.int32).reshape(-1, 2 * width + 1)

    def _narrow(self, block: bytes, width: int) -> bytes:
        return pack(*unpack(np.frombuffer(block, np.int32).reshape(self.block_size, -1), width)).tobytes()

    def _block_bytes(self, width: int) -> int:
        return self.block_size * (2 * width + 1) * _WORD_BYTES
