"""The store of blocks of rows, and the hashes that are its keys. It imports neither the engine nor metrics.

A block of rows has as many tokens as a block of the engine's KV cache, B, but is shifted by one: block b has the rows
of the tokens at positions b*B+1 to (b+1)*B, because the first token of a sequence has no row. An engine that reads m*B
tokens from its prefix cache returns no rows for the first m blocks.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from scoremode_server.rows import Columns, Rows, num_words, with_more_top

HASH_BYTES = 16

BLOCK_OVERHEAD_BYTES = 384
"""Memory of a stored block in addition to its rows. CPython 3.11 was measured to take at most 383 bytes."""

_CELL_BYTES = 4


@dataclass(slots=True, eq=False)
class RowStore:
    """Blocks of rows by block hash. The least recently used are evicted first.

    All blocks with their overhead take at most `max_bytes`; 0 turns the store off. A block serves requests for at most
    as many top tokens as it has, and a block with more replaces it. Everything else that determines a row is part of
    the hash.
    """

    block_size: int
    max_bytes: int
    num_bytes: int = 0
    generation: int = 0
    """Increases when rows may have become wrong, such as by new weights. Rows of an earlier generation are not used."""
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(HASH_BYTES))
    """The key of hashes, so that no client can search for collisions."""
    _blocks: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    _num_open_changes: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether there is a budget, and no weights are being changed."""
        return self.max_bytes > 0 and not self._num_open_changes

    def get(self, block_hashes: Sequence[bytes], columns: Columns) -> dict[bytes, bytes]:
        """Look up a sequence's stored blocks that have at least as many top tokens as `columns`. Returns them by hash.

        They become the most recently used, the sequence's first block last of all, because the others are useless
        without it.
        """
        hits: dict[bytes, bytes] = {}
        min_bytes = self._block_bytes(columns)
        for block_hash in reversed(block_hashes):
            block = self._blocks.get(block_hash)
            if block is not None and len(block) >= min_bytes:
                self._blocks.move_to_end(block_hash)
                hits[block_hash] = block
        return hits

    def put(self, generation: int, block_hashes: Sequence[bytes], blocks: Mapping[bytes, bytes]) -> int:
        """Store the computed blocks of a sequence, unless they are of an earlier generation. All its stored blocks
        become the most recently used, as in `get`. Returns how many blocks were evicted."""
        if not blocks or generation != self.generation or not self.is_usable:
            return 0
        for block_hash in reversed(block_hashes):
            block, stored = blocks.get(block_hash, b""), self._blocks.get(block_hash, b"")
            if len(block) > len(stored):
                self._blocks[block_hash] = block
                self.num_bytes += len(block) - len(stored) + (0 if stored else BLOCK_OVERHEAD_BYTES)
            if stored:
                self._blocks.move_to_end(block_hash)
        num_evicted = 0
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= len(self._blocks.popitem(last=False)[1]) + BLOCK_OVERHEAD_BYTES
            num_evicted += 1
        return num_evicted

    def clear(self) -> None:
        """Drop all rows and start a new generation."""
        self._blocks.clear()
        self.num_bytes = 0
        self.generation += 1

    @contextmanager
    def change(self) -> Iterator[None]:
        """Drop all rows, and store none while the weights change inside this context."""
        self.clear()
        self._num_open_changes += 1
        try:
            yield
        finally:
            self._num_open_changes -= 1
            self.clear()

    def split(self, block_hashes: Sequence[bytes], rows: Rows) -> dict[bytes, bytes]:
        """Split rows into blocks, one per hash. The rows after the last block are left out."""
        step = self._block_bytes(rows.columns)
        data = rows.table[: len(block_hashes) * self.block_size].tobytes()
        return {block_hash: data[index * step : (index + 1) * step] for index, block_hash in enumerate(block_hashes)}

    def join(self, blocks: Sequence[bytes], columns: Columns) -> Rows:
        """Join blocks into rows with these columns. The blocks may have more top tokens."""
        joined = b"".join(blocks)
        if len(joined) > len(blocks) * self._block_bytes(columns):
            joined = b"".join(self._narrowed(block, columns) for block in blocks)
        return Rows.from_bytes(joined, columns)

    def _narrowed(self, block: bytes, columns: Columns) -> bytes:
        num_more = len(block) // self.block_size // _CELL_BYTES - num_words(columns)
        return Rows.from_bytes(block, with_more_top(columns, num_more // 2)).narrowed(columns).table.tobytes()

    def _block_bytes(self, columns: Columns) -> int:
        return self.block_size * num_words(columns) * _CELL_BYTES

    def hashes(self, token_ids: np.ndarray, identity: str) -> list[bytes]:
        """Hash each whole block of tokens [n] int32; the first token is in no block. A hash covers all tokens up to the
        block's end, and `identity`: everything else that the rows depend on. Empty if n is at most the block size."""
        data = token_ids.tobytes()
        step = self.block_size * token_ids.itemsize
        # The first token has no row, but all rows depend on it.
        first = data[: token_ids.itemsize]
        key = blake2b(identity.encode(), key=self._secret, digest_size=HASH_BYTES).digest()
        running, hashes = blake2b(first, key=key, digest_size=HASH_BYTES), []
        for start in range(token_ids.itemsize, len(data) - step + 1, step):
            running.update(data[start : start + step])
            hashes.append(running.digest())
        return hashes
