"""A scoring request that may use rows of the store and of other in-flight requests."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.engine.protocol import EngineClient

from scoremode_server.engine.passes import EnginePass, RowsRequest, run_engine
from scoremode_server.engine.store import RowStore
from scoremode_server.worker.row_spec import RowSpec


@dataclass(eq=False)
class CachedRequest:
    """One request: the engine computes what is not found elsewhere, and the answer is complete or an error.

    `in_flight` has the request that computes a block, by its hash. Others wait for it, but only for one that was
    registered earlier, so deadlocks cannot happen.
    """

    engine: EngineClient
    store: RowStore
    in_flight: dict[bytes, "CachedRequest"]
    request: RowsRequest
    block_hashes: Sequence[bytes]
    num_computed: int
    """Tokens at the start that are probably in the prefix cache."""
    num_cached_tokens: int = 0
    """Tokens that were not computed for the answer."""
    has_waited: bool = False
    """Whether it waited for the rows of another request."""
    num_evicted: int = 0
    """Blocks that were evicted for its own."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its blocks are in the store, or it failed."""
    _num_rows_found: int = 0
    _blocks_found: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generation = self.store.generation
        self.columns = self.request.spec.columns

    @property
    def num_hits(self) -> int:
        """Rows of the answer that were not computed for it."""
        return max(0, self._num_rows_found - self.request.first_row)

    @property
    def is_current(self) -> bool:
        """Whether the weights are those that the request began with."""
        return self._generation == self.store.generation

    async def run(self) -> EnginePass:
        """A pass with every row that the request needs."""
        size = self.store.block_size
        # The engine may leave out blocks whose rows are not needed, so no request may wait for them.
        registered = self.block_hashes[self.request.first_row // size :]
        self._blocks_found = self.store.get(self.block_hashes, self.columns)
        computing = self._register(registered)
        try:
            run = await self._complete_run(computing)
            if needed := self._needed(run):
                start = needed.start * size
                blocks = [self._blocks_found[self.block_hashes[block]] for block in needed]
                found = self.store.join(blocks, self.columns)
                run.rows.table[start : run.first] = found.table[: run.first - start]
            num_left_out = -(-run.first // size)
            self._store(self.block_hashes[num_left_out:], run, num_left_out * size)
            return run
        finally:
            # Others wait for this request, whether it succeeded or not.
            for block_hash in registered:
                if self.in_flight.get(block_hash) is self:
                    del self.in_flight[block_hash]
            self.has_ended.set()

    def _register(self, block_hashes: Sequence[bytes]) -> dict[bytes, "CachedRequest"]:
        """Register for the blocks that are not in the store and that no other request computes with as many top tokens.
        Returns the requests that compute the others."""
        computing = {}
        for block_hash in block_hashes:
            if block_hash in self._blocks_found:
                continue
            other = self.in_flight.get(block_hash)
            if other is not None and other.request.spec.num_top >= self.request.spec.num_top:
                computing[block_hash] = other
            else:
                self.in_flight[block_hash] = self
        return computing

    async def _complete_run(self, computing: Mapping[bytes, "CachedRequest"]) -> EnginePass:
        """A pass, and all rows that it left out. The engine starts before this waits for other requests."""
        # If the first block is not found, a hit helps only if its rows are not needed.
        reads = self.request.first_row >= self.store.block_size or (
            (first_hash := self.block_hashes[0]) in self._blocks_found or first_hash in computing
        )
        num_known = self.num_computed if reads else 0
        run = await run_engine(self.engine, self.request, reads_prefix_cache=reads, num_known=num_known)
        self._num_rows_found, self.num_cached_tokens = run.first, run.num_cached_tokens
        missing = self._missing(run)
        if missing and self.is_current:
            missing = await self._find(run, computing)
        if run.first == 0 or (self.is_current and not missing):
            return run
        self._num_rows_found = self.num_cached_tokens = 0
        run = await run_engine(self.engine, self.request, suffix="-whole")
        run.check(self.request.first_row)
        return run

    def _needed(self, run: EnginePass) -> range:
        """The blocks with rows that a pass left out and the request needs."""
        size, first_row = self.store.block_size, self.request.first_row
        return range(first_row // size, -(-run.first // size)) if run.first > first_row else range(0)

    def _missing(self, run: EnginePass) -> list[int]:
        """The needed blocks that were not found. Rows after the last whole block are never found."""
        hashes = self.block_hashes
        return [block for block in self._needed(run) if block >= len(hashes) or hashes[block] not in self._blocks_found]

    async def _find(self, run: EnginePass, computing: Mapping[bytes, "CachedRequest"]) -> list[int]:
        """Find the blocks that a pass left out: in the store, once earlier requests have stored theirs, and by a short
        pass. Returns the blocks that are still missing."""
        needed = self._needed(run)
        for other in {computing[each] for each in self.block_hashes[needed.start : needed.stop] if each in computing}:
            self.has_waited = True
            await other.has_ended.wait()
        self._blocks_found |= self.store.get(self.block_hashes, self.columns)
        last = needed[-1]
        if self._missing(run) == [last] and last < len(self.block_hashes) and self.request.spec.identity is None:
            await self._run_last_block(last)
        return self._missing(run)

    async def _run_last_block(self, block: int) -> None:
        """Score the tokens up to the end of the only missing block, the last one that a pass left out.

        This happens when prompts differ after a block of the KV cache: all its keys and values are cached, but no
        request has scored the token after it. vLLM never reads a prompt's last block from its cache, so this computes
        one block.
        """
        end = (block + 1) * self.store.block_size
        start = end - self.store.block_size
        short = RowsRequest.score(
            np.asarray(self.request.token_ids[: end + 1]).tolist(),
            RowSpec(num_top=self.request.spec.num_top),
            request_id=self.request.request_id,
            cache_salt=self.request.prompt["cache_salt"],
            options=self.request.options,
            queue=self.request.queue,
        )
        run = await run_engine(self.engine, short, reads_prefix_cache=True, num_known=start, suffix="-last-block")
        if run.first <= start:
            self._blocks_found |= self._store([self.block_hashes[block]], run, start)
            self._num_rows_found = min(self._num_rows_found, run.first)
            self.num_cached_tokens = min(self.num_cached_tokens, run.num_cached_tokens)

    def _store(self, block_hashes: Sequence[bytes], run: EnginePass, first_row: int) -> dict[bytes, bytes]:
        """Store the blocks that a pass computed from a row on."""
        computed = self.store.split(block_hashes, run.rows[first_row:])
        self.num_evicted += self.store.put(self._generation, self.block_hashes, computed)
        return computed
