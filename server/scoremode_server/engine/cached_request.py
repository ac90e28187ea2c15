"""Runs one call of vLLM's `generate`, and fills in rows, each with one token's scores, from the store or other
requests."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from vllm.engine.protocol import EngineClient

from scoremode_server.engine.passes import run_engine
from scoremode_server.engine.sequence import EnginePass, TokenSequence
from scoremode_server.engine.store import RowStore


@dataclass(eq=False)
class CachedRequest:
    """Runs one pass. vLLM computes no rows for tokens that it reads from its prefix cache: they are looked up.

    `in_flight` maps a block's hash to the request that computes the block. Requests only wait for requests that
    registered earlier, so deadlocks cannot happen.
    """

    engine: EngineClient
    store: RowStore
    in_flight: dict[bytes, "CachedRequest"]
    engine_pass: EnginePass
    block_hashes: Sequence[bytes]
    num_computed: int
    """How many tokens at the start are probably in the prefix cache."""
    has_waited: bool = False
    """Whether this request waited for another request's rows."""
    num_evicted: int = 0
    """How many blocks the store evicted for this request's blocks."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this request's blocks are in the store, or when it has failed."""
    _num_rows_found: int = 0
    _blocks_found: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generation = self.store.generation
        self.columns = self.engine_pass.spec.columns

    @property
    def num_hits(self) -> int:
        """How many rows of the answer were found, not computed for this request."""
        return max(0, self._num_rows_found - self.engine_pass.first_row)

    @property
    def is_current(self) -> bool:
        """Whether the weights are still those that the request began with."""
        return self._generation == self.store.generation

    async def run(self) -> None:
        """Run the pass until it has every row that its sequence needs, or raise an error."""
        size, engine_pass = self.store.block_size, self.engine_pass
        # The engine may compute no rows before `first_row`, so other requests must not wait for those blocks.
        registered = self.block_hashes[engine_pass.first_row // size :]
        self._blocks_found = self.store.get(self.block_hashes, self.columns)
        computing = self._register(registered)
        try:
            await self._compute(computing)
            num_missing = engine_pass.num_missing
            if needed := self._needed():
                start = needed.start * size
                blocks = [self._blocks_found[self.block_hashes[block]] for block in needed]
                joined = self.store.join(blocks, self.columns)
                engine_pass.rows.table[start:num_missing] = joined.table[: num_missing - start]
            num_left_out = -(-num_missing // size)
            self._store(self.block_hashes[num_left_out:], engine_pass, num_left_out * size)
        finally:
            # Requests that wait for this one must resume, even if it failed.
            for block_hash in registered:
                if self.in_flight.get(block_hash) is self:
                    del self.in_flight[block_hash]
            self.has_ended.set()

    def _register(self, block_hashes: Sequence[bytes]) -> dict[bytes, "CachedRequest"]:
        """Register this request for the missing blocks, except blocks that another request computes with at least as
        many top tokens. Returns the other requests by block hash."""
        computing = {}
        for block_hash in block_hashes:
            if block_hash in self._blocks_found:
                continue
            other = self.in_flight.get(block_hash)
            if other is not None and other.engine_pass.spec.num_top >= self.engine_pass.spec.num_top:
                computing[block_hash] = other
            else:
                self.in_flight[block_hash] = self
        return computing

    async def _compute(self, computing: Mapping[bytes, "CachedRequest"]) -> None:
        """Run the pass, then find the rows that it left out; this may wait for other requests. If rows are still
        missing, run the pass again without the prefix cache."""
        engine_pass = self.engine_pass
        # Reading the prefix cache helps only if the first block's rows can be found elsewhere or are not needed.
        reads = engine_pass.first_row >= self.store.block_size or (
            (first_hash := self.block_hashes[0]) in self._blocks_found or first_hash in computing
        )
        num_known = self.num_computed if reads else 0
        await run_engine(self.engine, engine_pass, reads_prefix_cache=reads, num_known=num_known)
        self._num_rows_found = engine_pass.num_missing
        if self._missing() and self.is_current:
            await self._find(computing)
        if engine_pass.num_missing and (self._missing() or not self.is_current):
            self._num_rows_found = 0
            await run_engine(self.engine, engine_pass, suffix="-whole")
            engine_pass.check()

    def _needed(self) -> range:
        """Indices of the blocks with rows that the sequence needs and the pass left out."""
        size, first_row, num_missing = self.store.block_size, self.engine_pass.first_row, self.engine_pass.num_missing
        return range(first_row // size, -(-num_missing // size)) if num_missing > first_row else range(0)

    def _missing(self) -> list[int]:
        """Indices of the needed blocks that were not found. Rows after the last whole block are never stored."""
        hashes = self.block_hashes
        return [block for block in self._needed() if block >= len(hashes) or hashes[block] not in self._blocks_found]

    async def _find(self, computing: Mapping[bytes, "CachedRequest"]) -> None:
        """Find the blocks that the pass left out, once other requests have stored theirs. A short pass computes the
        last block if only that is missing."""
        needed = self._needed()
        for other in {computing[key] for key in self.block_hashes[needed.start : needed.stop] if key in computing}:
            self.has_waited = True
            await other.has_ended.wait()
        self._blocks_found |= self.store.get(self.block_hashes, self.columns)
        last = needed[-1]
        if self._missing() == [last] and last < len(self.block_hashes) and self.engine_pass.spec.identity is None:
            await self._run_last_block(last)

    async def _run_last_block(self, block: int) -> None:
        """Compute the only missing block, the last one that the pass left out, by scoring the tokens up to its end.

        Such a block is missing if another prompt was the same up to its end and continued differently. Its keys and
        values are then cached, but no request has scored the token after it. vLLM never reads a prompt's last block
        from its cache, so the short pass computes one block.
        """
        end = (block + 1) * self.store.block_size
        start, whole = end - self.store.block_size, self.engine_pass
        settings = replace(
            whole.sequence.settings, top_logprobs=whole.spec.num_top, cache_salt=whole.prompt["cache_salt"]
        )
        short = EnginePass(TokenSequence(context=np.asarray(whole.token_ids[: end + 1]).tolist()))
        short.begin(settings, whole.request_id)
        await run_engine(self.engine, short, reads_prefix_cache=True, num_known=start, suffix="-last-block")
        if short.num_missing <= start:
            self._blocks_found |= self._store([self.block_hashes[block]], short, start)
            self._num_rows_found = min(self._num_rows_found, short.num_missing)
            whole.num_cached_tokens = min(whole.num_cached_tokens, short.num_cached_tokens)

    def _store(self, block_hashes: Sequence[bytes], computed_by: EnginePass, first_row: int) -> dict[bytes, bytes]:
        """Store the blocks that a pass computed, from row `first_row` on. Returns them by hash."""
        computed = self.store.split(block_hashes, computed_by.rows[first_row:])
        self.num_evicted += self.store.put(self._generation, self.block_hashes, computed)
        return computed
