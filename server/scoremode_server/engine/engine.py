"""Scores token sequences on vLLM's engine. The result is a row of scores for each token.

vLLM returns no prompt logprobs for positions that it reads from its prefix cache. Their rows, computed for an earlier
request, are filled in from a store. The `cache_salt` has an id of this process and the store's generation, so vLLM's
prefix cache only finds tokens whose rows this process has computed.
"""

import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient

from scoremode_server.engine.admission import Admission, EngineSize
from scoremode_server.engine.cached_request import CachedRequest
from scoremode_server.engine.passes import in_engine, run_engine
from scoremode_server.engine.sequence import EnginePass
from scoremode_server.engine.store import HASH_BYTES, RowStore
from scoremode_server.errors import EngineOutputError
from scoremode_server.metrics import Metrics
from scoremode_server.rows import Rows, missing_row, received_rows
from scoremode_server.vllm_compat.engine_client import may_go_unnoticed, within_changes

MAX_COMPUTED = 2**16
"""Limit on hashes of blocks that are remembered as computed. They take some 13 MiB."""


class ScoringEngine:
    """Runs scoring requests on vLLM's engine client, with a store for rows of shared prefixes."""

    def __init__(self, engine: EngineClient, store: RowStore, metrics: Metrics, size: EngineSize) -> None:
        self.admission = Admission(size, engine.abort, metrics.show_load)
        self.block_size = store.block_size
        self._engine = engine
        self._store = store
        self._metrics = metrics
        self._in_flight: dict[bytes, CachedRequest] = {}
        # A `dict` would step over all deleted entries to find its oldest entry.
        self._computed: OrderedDict[bytes, None] = OrderedDict()
        self._process = secrets.token_hex(8)
        within_changes(engine, store.change, lambda: metrics.cache_bytes.set(store.num_bytes))

    async def rows(self, engine_pass: EnginePass) -> EnginePass:
        """Compute the rows of a pass's targets, and return the pass. If the caller is cancelled, the engine's requests
        are aborted."""
        arrival, num_tokens = time.monotonic(), len(engine_pass.token_ids)
        if (token_ids := self._tokens_to_cache(engine_pass)) is None:
            await self._run_alone(engine_pass)
        else:
            engine_pass.token_ids = token_ids
            await self._run_cached(engine_pass, token_ids)
        engine_pass.rows = engine_pass.rows[engine_pass.first_row :]
        self._metrics.count(engine_pass.output, num_tokens - 1, arrival)
        engine_pass.sequence.settings.queue.done(num_tokens, engine_pass.num_cached_tokens)
        return engine_pass

    async def window_rows(self, engine_pass: EnginePass) -> Rows:
        """Compute the rows of a window from its first target on, without the cache. EngineOutputError if a row is
        missing or has a NaN. The caller must call `RequestQueue.done`."""
        arrival, sequence = time.monotonic(), engine_pass.sequence
        output = await in_engine(self._engine, engine_pass)
        rows = received_rows(output, engine_pass.spec.columns)
        if len(rows) != sequence.num_targets:
            raise EngineOutputError(f"the engine computed {len(rows)} of a window's {sequence.num_targets} rows")
        if (is_nan := rows.has_nan).any():
            raise missing_row(sequence.first + int(is_nan.argmax()))
        self._metrics.count(output, sequence.num_tokens - 1, arrival)
        return rows

    def _tokens_to_cache(self, engine_pass: EnginePass) -> np.ndarray | None:
        """The tokens [n] int32 of a pass; None if it cannot use the cache."""
        token_ids = engine_pass.token_ids
        if not (engine_pass.sequence.uses_cache and self._store.is_usable and len(token_ids) > self.block_size):
            return None
        try:
            return np.frombuffer(array("i", token_ids), np.int32)
        except OverflowError:
            # A token does not fit int32. The engine refuses it, because it is outside the vocabulary.
            return None

    async def _run_alone(self, engine_pass: EnginePass) -> None:
        if engine_pass.sequence.settings.owner:
            # Generation reads the prefix cache too, but must not find what another owner scored.
            engine_pass.prompt = {**engine_pass.prompt, "cache_salt": self._salt(engine_pass)}
        await run_engine(self._engine, engine_pass)
        engine_pass.check()

    async def _run_cached(self, engine_pass: EnginePass, token_ids: np.ndarray) -> None:
        salt, first_row = self._salt(engine_pass), engine_pass.first_row
        engine_salt = f"scoremode-{self._process}-{self._store.generation}-{salt}"
        engine_pass.prompt = {**engine_pass.prompt, "cache_salt": engine_salt}
        # Keys and values do not depend on which rows are wanted.
        computed = block_hashes = self._store.hashes(token_ids, self._identity(engine_pass, salt))
        if first_row // self.block_size == len(computed):
            # No whole block has rows that are needed.
            block_hashes = []
        elif (row_identity := engine_pass.spec.identity) is not None:
            block_hashes = self._store.hashes(token_ids, self._identity(engine_pass, salt, row_identity))
        num_computed = self._num_computed(computed)
        cached = CachedRequest(self._engine, self._store, self._in_flight, engine_pass, block_hashes, num_computed)
        await cached.run()
        self._metrics.hits.inc(cached.num_hits)
        self._metrics.misses.inc(len(engine_pass.rows) - first_row - cached.num_hits)
        self._metrics.joined.inc(cached.has_waited)
        self._metrics.evictions.inc(cached.num_evicted)
        self._metrics.cache_bytes.set(self._store.num_bytes)
        # Completions store text and JSON under these hashes, so they must not be those of earlier weights.
        if cached.is_current:
            engine_pass.block_hashes = block_hashes
            engine_pass.num_cached_blocks = min(len(block_hashes), -(-engine_pass.num_missing // self.block_size))

    def _num_computed(self, block_hashes: Sequence[bytes]) -> int:
        """Count the tokens at the start whose keys and values are computed or being computed, and record the blocks
        after them."""
        num_blocks = len(list(takewhile(self._computed.__contains__, block_hashes)))
        self._computed.update(dict.fromkeys(block_hashes[num_blocks:]))
        while len(self._computed) > MAX_COMPUTED:
            self._computed.popitem(last=False)
        return num_blocks * self.block_size

    def _identity(self, engine_pass: EnginePass, salt: str, row_identity: tuple[Any, ...] | None = None) -> str:
        """Everything except tokens that keys and values depend on. With `row_identity`, which is a `RowSpec.identity`:
        everything that rows depend on."""
        lora = engine_pass.sequence.settings.options.get("lora_request")
        adapter = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        return repr((self._store.generation, adapter, salt, row_identity))

    def _salt(self, engine_pass: EnginePass) -> str:
        salt, owner = engine_pass.prompt.get("cache_salt") or "", engine_pass.sequence.settings.owner
        if not owner:
            return salt
        # The hash is short, because some of vLLM's KV connectors use it in file names.
        return blake2b(f"{owner}.{salt}".encode(), digest_size=HASH_BYTES).hexdigest()


def make_store(config: VllmConfig, max_bytes: int) -> RowStore:
    """Make a store of at most `max_bytes` for an engine. It is off if the engine has no prefix cache, or if its weights
    may change unnoticed. Hits in vLLM's prefix cache end at multiples of the store's block size."""
    settings = config.cache_config
    is_on = settings.enable_prefix_caching and not may_go_unnoticed(config)
    return RowStore(settings.prefix_match_unit or settings.block_size, max_bytes if is_on else 0)
