"""A scoring request that may use rows of the store and of other in-flight requests."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from vllm.engine.protocol import EngineClient

from scoremode_server.prefix_cache.run import EnginePass, RowsRequest, run_engine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.vllm_patches.row_spec import RowSpec


class CachedRequest:
    """One request: the engine computes what is not found elsewhere, and the answer is complete or an error.

    `in_flight` has the request that computes a block, by its hash. Others wait for it, but only for one that was
    registered earlier, so there is no deadlock.
    """

    def __init__(
        self,
        engine: EngineClient,
        store: RowStore,
        in_flight: dict[bytes, "CachedRequest"],
        request: RowsRequest,
        block_hashes: Sequence[bytes],
        num_computed: int,
    ) -> None:
        self._engine = engine
        self._store = store
        self._in_flight = in_flight
        self._request = request
        self._block_hashes = block_hashes
        self._num_computed = num_computed
        """Tokens at the start that are probably in the prefix cache."""
        self._generation = store.generation
        # The engine may leave out blocks whose rows are not needed, so no request may wait for them.
        self._needed_hashes = block_hashes[request.first_row // store.block_size :]
        self.num_columns = request.spec.num_columns
        self.released = asyncio.Event()
        self.blocks: Mapping[bytes, bytes] = {}
        """After the release, the blocks that it found or computed; none if it failed."""
        self._found: dict[bytes, bytes] = {}
        self._last_block: dict[bytes, bytes] = {}
        self._num_found = 0
        self.num_cached_tokens = 0
        """Tokens that were not computed for the answer."""
        self.joined = False
        """Whether it waited for the rows of another request."""
        self.num_evicted = 0
        """Blocks that were evicted for its own."""

    @property
    def num_hits(self) -> int:
        """Rows of the answer that were not computed for it."""
        return max(0, self._num_found - self._request.first_row)

    @property
    def is_current(self) -> bool:
        """Whether the weights are those that the request began with."""
        return self._generation == self._store.generation

    async def run(self) -> EnginePass:
        """A pass with every row that the request needs."""
        self._found = self._store.get(self._block_hashes, self.num_columns)
        earlier = self._register()
        try:
            run = await self._complete_run(earlier)
            self._fill(run)
            self._store_blocks(run)
            return run
        finally:
            self._release()

    def _register(self) -> dict[bytes, "CachedRequest"]:
        """Register for the blocks that were not found and that no other request computes with as many columns. Returns
        the requests that compute the others."""
        earlier = {}
        for block_hash in self._needed_hashes:
            if block_hash in self._found:
                continue
            other = self._in_flight.get(block_hash)
            if other is not None and other.num_columns >= self.num_columns:
                earlier[block_hash] = other
            else:
                self._in_flight[block_hash] = self
        return earlier

    def _release(self) -> None:
        """Wake the requests that wait for this one, whether it succeeded or not."""
        for block_hash in self._needed_hashes:
            if self._in_flight.get(block_hash) is self:
                del self._in_flight[block_hash]
        self.released.set()

    async def _complete_run(self, earlier: Mapping[bytes, "CachedRequest"]) -> EnginePass:
        """A pass whose missing rows are all found. The engine starts before this waits for other requests."""
        # If the first block is not found, a hit helps only if its rows are not needed.
        reads = self._request.first_row >= self._store.block_size or (
            (first_hash := self._block_hashes[0]) in self._found or first_hash in earlier
        )
        run = await self._run(reads_prefix_cache=reads, num_known=self._num_computed if reads else 0)
        missing = self._missing(run)
        if missing and self.is_current:
            missing = await self._collect(run, missing, earlier)
        if run.first == 0 or (self.is_current and not missing):
            return run
        self._found, self._last_block = {}, {}
        run = await self._run(reads_prefix_cache=False, suffix="-whole")
        run.check(self._request.first_row)
        return run

    async def _run(self, *, reads_prefix_cache: bool, num_known: int = 0, suffix: str = "") -> EnginePass:
        run = await run_engine(
            self._engine, self._request, reads_prefix_cache=reads_prefix_cache, num_known=num_known, suffix=suffix
        )
        self._num_found, self.num_cached_tokens = run.first, run.num_cached_tokens
        return run

    def _needed(self, run: EnginePass) -> range:
        """The blocks with rows that a pass left out and the request needs."""
        size, first_row = self._store.block_size, self._request.first_row
        return range(first_row // size, -(-run.first // size)) if run.first > first_row else range(0)

    def _missing(self, run: EnginePass) -> list[int]:
        """The needed blocks that were not found. What is after the last whole block never is."""
        hashes = self._block_hashes
        return [block for block in self._needed(run) if block >= len(hashes) or hashes[block] not in self._found]

    async def _collect(
        self, run: EnginePass, missing: list[int], earlier: Mapping[bytes, "CachedRequest"]
    ) -> list[int]:
        """Find the blocks that a pass left out: in earlier requests, in the store, and by a short pass. Returns the
        blocks that are still missing."""
        for block in missing:
            other = earlier.get(self._block_hashes[block]) if block < len(self._block_hashes) else None
            if other is not None and self._block_hashes[block] not in self._found:
                self.joined = True
                await other.released.wait()
                self._found |= {each: other.blocks[each] for each in self._block_hashes if each in other.blocks}
        if missing := self._missing(run):
            self._found |= self._store.get(self._block_hashes, self.num_columns)
            missing = self._missing(run)
        only_the_last = missing and missing == list(self._needed(run)[-1:]) and missing[-1] < len(self._block_hashes)
        if only_the_last and self._request.spec.identity is None:
            await self._run_last_block(missing[-1])
            missing = self._missing(run)
        return missing

    async def _run_last_block(self, block: int) -> None:
        """Score the tokens up to the end of the only missing block, the last one that a pass left out.

        This happens when prompts differ after a block of the KV cache: all its keys and values are cached, but no
        request has scored the token after it. vLLM never reads a prompt's last block from its cache, so this computes
        one block.
        """
        end = (block + 1) * self._store.block_size
        start = end - self._store.block_size
        short = RowsRequest.score(
            np.asarray(self._request.token_ids[: end + 1]).tolist(),
            RowSpec(num_top=self._request.spec.num_top),
            request_id=self._request.request_id,
            cache_salt=self._request.prompt["cache_salt"],
            options=self._request.options,
            queue=self._request.queue,
        )
        run = await run_engine(self._engine, short, reads_prefix_cache=True, num_known=start, suffix="-last-block")
        if run.first <= start:
            self._last_block = self._store.split([self._block_hashes[block]], run.rows[start:])
            self._found |= self._last_block
            self._num_found = min(self._num_found, run.first)
            self.num_cached_tokens = min(self.num_cached_tokens, run.num_cached_tokens)

    def _fill(self, run: EnginePass) -> None:
        needed = self._needed(run)
        if needed:
            blocks = [self._found[self._block_hashes[block]] for block in needed]
            start = needed.start * self._store.block_size
            found = self._store.join(blocks, self.num_columns)
            run.rows.table[start : run.first] = found.table[: run.first - start]

    def _store_blocks(self, run: EnginePass) -> None:
        """Store the blocks that were computed, and give them to the requests that wait."""
        num_left_out = -(-run.first // self._store.block_size)
        rows = run.rows[num_left_out * self._store.block_size :]
        new = self._last_block | self._store.split(self._block_hashes[num_left_out:], rows)
        self.num_evicted = self._store.put(self._generation, self._block_hashes, new, may_evict=self._request.may_evict)
        self.blocks = self._found | new
