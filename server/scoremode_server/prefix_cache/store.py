"""Blocks of rows in memory. Data only: no engine, no event loop, no metrics.

Rows are kept in blocks of as many tokens as a block of the engine's KV cache, shifted by one: block b holds the rows of
the tokens at positions b*B+1 to (b+1)*B. When the engine reads m*B tokens from its prefix cache, the last hidden state
that it does not compute is the one at m*B-1, which predicts token m*B; so the rows that it leaves out are exactly m
whole blocks.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from scoremode_server.rows import Rows

ENTRY_BYTES = 384
"""Bytes that a block costs besides its rows: key, object headers, hash tables. Measured as growth of resident memory
with CPython 3.11: 50 to 245 while a store fills up, and up to 383 in a full one that drops blocks for others."""

_WORD_BYTES = 4


class RowStore:
    """Blocks of rows by block hash, least recently used out first, at most `max_bytes` of them with their overhead; 0
    turns it off.

    A block holds the columns that were computed: it answers requests for as many or fewer, and is replaced by one with
    more.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.generation = 0
        """Goes up whenever rows may have become wrong; rows computed in an earlier one are worth nothing."""
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_changes = 0

    def __len__(self) -> int:
        """Blocks here."""
        return len(self._blocks)

    @property
    def enabled(self) -> bool:
        """Whether rows may be taken and kept: never without a budget, nor while the weights are being changed."""
        return self.max_bytes > 0 and not self._num_changes

    def get(self, block_hashes: Sequence[bytes], num_columns: int) -> dict[bytes, bytes]:
        """The blocks of a sequence that are here with at least so many columns; they become the most recently used,
        its first block most of all, since a block without those before it is of no use."""
        found: dict[bytes, bytes] = {}
        wanted = self._block_bytes(num_columns)
        for block_hash in reversed(block_hashes):
            block = self._blocks.get(block_hash)
            if block is not None and len(block) >= wanted:
                self._blocks.move_to_end(block_hash)
                found[block_hash] = block
        return found

    def put(
        self, generation: int, block_hashes: Sequence[bytes], blocks: Mapping[bytes, bytes], *, makes_room: bool = True
    ) -> int:
        """Keep the computed blocks of a sequence, unless they are of an earlier generation. All blocks of the sequence
        that are here become the most recently used, as in `get`. Returns how many blocks were dropped for want of
        room.

        Blocks that make no room are kept only where there is some, and are the first to go: those of windows of long
        texts would otherwise take the place of prefixes that come again.
        """
        if generation != self.generation or not self.enabled:
            return 0
        if not makes_room:
            self._fill_up(blocks)
            return 0
        # What would be dropped for the sequence's own first blocks is not put in at all.
        fitting = self._with_room(block_hashes, blocks)
        num_evicted = sum(block_hash in blocks for block_hash in block_hashes[len(fitting) :])
        for block_hash in reversed(fitting):
            block, kept = blocks.get(block_hash), self._blocks.get(block_hash)
            if kept is not None and (block is None or len(block) < len(kept)):
                self._blocks.move_to_end(block_hash)
            elif block is not None:
                num_evicted += self._replace(block_hash, block)
        return num_evicted

    def _fill_up(self, blocks: Mapping[bytes, bytes]) -> None:
        for block_hash, block in blocks.items():
            cost = len(block) + ENTRY_BYTES
            if block_hash not in self._blocks and self.num_bytes + cost <= self.max_bytes:
                self._blocks[block_hash] = block
                self._blocks.move_to_end(block_hash, last=False)
                self.num_bytes += cost

    def _with_room(self, block_hashes: Sequence[bytes], blocks: Mapping[bytes, bytes]) -> Sequence[bytes]:
        """The first hashes of a sequence, as many as have room together."""
        room = self.max_bytes
        for index, block_hash in enumerate(block_hashes):
            block = blocks.get(block_hash)
            room -= 0 if block is None else len(block) + ENTRY_BYTES
            if room < 0:
                return block_hashes[:index]
        return block_hashes

    def _replace(self, block_hash: bytes, block: bytes) -> int:
        """Put a block in the place of what is kept under its hash, so that the bound holds at every moment; the number
        of others that were dropped for it."""
        old = self._blocks.pop(block_hash, None)
        self.num_bytes -= 0 if old is None else len(old) + ENTRY_BYTES
        cost = len(block) + ENTRY_BYTES
        num_evicted = 0
        while self.num_bytes + cost > self.max_bytes:
            _, evicted = self._blocks.popitem(last=False)
            self.num_bytes -= len(evicted) + ENTRY_BYTES
            num_evicted += 1
        self._blocks[block_hash] = block
        self.num_bytes += cost
        return num_evicted

    def clear(self) -> None:
        """Drop all rows, and begin a new generation."""
        self._blocks.clear()
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

    def split(self, block_hashes: Sequence[bytes], rows: Rows) -> dict[bytes, bytes]:
        """The blocks of rows that begin with them; there may be more rows."""
        step = self._block_bytes(rows.num_columns)
        data = rows.table[: len(block_hashes) * self.block_size].tobytes()
        return {block_hash: data[index * step : (index + 1) * step] for index, block_hash in enumerate(block_hashes)}

    def join(self, blocks: Sequence[bytes], num_columns: int) -> Rows:
        """The rows of blocks with at least so many columns."""
        num_bytes = self._block_bytes(num_columns)
        fitting = [block if len(block) == num_bytes else self._narrowed(block, num_columns) for block in blocks]
        return Rows.from_bytes(b"".join(fitting), num_columns)

    def _narrowed(self, block: bytes, num_columns: int) -> bytes:
        stored = (len(block) // _WORD_BYTES // self.block_size) // 2
        return Rows.from_bytes(block, stored).first_columns(num_columns).table.tobytes()

    def _block_bytes(self, num_columns: int) -> int:
        return self.block_size * (2 * num_columns + 1) * _WORD_BYTES
