"""The entry point to vLLM's engine for scoring requests: token sequences in, rows out.

Positions that vLLM takes from its prefix cache have no prompt logprobs. Their rows, computed for an earlier request,
are filled in from a store. A `cache_salt` of this process and of the store's generation makes sure that every hit has
rows.
"""

import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput

from scoremode_server.engine.admission import Admission, EngineSize
from scoremode_server.engine.cached_request import CachedRequest
from scoremode_server.engine.passes import RowsRequest, in_engine, run_engine
from scoremode_server.engine.store import HASH_BYTES, RowStore
from scoremode_server.errors import EngineOutputError
from scoremode_server.metrics import Metrics
from scoremode_server.rows import Rows, missing_row, received_rows
from scoremode_server.vllm_compat.engine_client import may_go_unnoticed, within_changes

MAX_COMPUTED = 2**16
"""Blocks of which the engine client remembers that they were computed, in some 13 MiB."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of one sequence."""

    rows: Rows
    """Of the tokens from the request's `first` on."""
    num_cached_tokens: int
    """Tokens that were not computed for this request."""


@dataclass(frozen=True, slots=True)
class EngineResult(ScoredRows):
    """The rows of one request to the engine, and what a completion needs in addition."""

    output: RequestOutput
    """vLLM's output of the last pass through the engine."""
    block_hashes: Sequence[bytes] = ()
    """Of the sequence's whole blocks; none if its rows may not be stored."""
    num_cached_blocks: int = 0
    """How many of the first blocks the engine did not compute."""


class ScoringEngine:
    """vLLM's engine client for scoring requests, with a store for rows of shared prefixes."""

    def __init__(self, engine: EngineClient, store: RowStore, metrics: Metrics, size: EngineSize) -> None:
        self.admission = Admission(size, engine.abort, metrics.show_load)
        self.block_size = store.block_size
        self._engine = engine
        self._store = store
        self._metrics = metrics
        self._in_flight: dict[bytes, CachedRequest] = {}
        # Not a `dict`: to find its oldest entry, it passes all that were deleted before.
        self._computed: OrderedDict[bytes, None] = OrderedDict()
        self._process = secrets.token_hex(8)
        within_changes(engine, store.change, lambda: metrics.cache_bytes.set(store.num_bytes))

    async def rows(self, request: RowsRequest) -> EngineResult:
        """Every row that a request needs. If the caller is cancelled, the engine's requests are aborted."""
        arrival = time.monotonic()
        token_ids = self._tokens_to_cache(request)
        result = await (self._run_alone(request) if token_ids is None else self._run_cached(request, token_ids))
        self._metrics.count(result.output, len(request.token_ids) - 1, arrival)
        if request.queue is not None:
            request.queue.done(len(request.token_ids), result.num_cached_tokens)
        return result

    async def window_rows(self, request: RowsRequest) -> Rows:
        """The rows of a window from its first target on, never cached. EngineOutputError if a row is missing or has a
        NaN. The caller calls `done`."""
        arrival = time.monotonic()
        output = await in_engine(self._engine, request)
        rows = received_rows(output, request.spec.columns)
        first = request.spec.first
        if len(rows) != len(request.token_ids) - first:
            raise EngineOutputError(
                f"the engine computed {len(rows)} rows of a window of {len(request.token_ids)} tokens"
            )
        if (is_nan := rows.has_nan).any():
            raise missing_row(first + int(is_nan.argmax()))
        self._metrics.count(output, len(request.token_ids) - 1, arrival)
        return rows

    def _tokens_to_cache(self, request: RowsRequest) -> np.ndarray | None:
        """The tokens [n] int32 of a request that can use the cache."""
        if not (request.use_cache and self._store.is_usable and len(request.token_ids) > self.block_size):
            return None
        try:
            return np.frombuffer(array("i", request.token_ids), np.int32)
        except OverflowError:
            # The engine refuses tokens outside the vocabulary.
            return None

    async def _run_alone(self, request: RowsRequest) -> EngineResult:
        if request.owner:
            # Generation reads the prefix cache too, and must not find what another owner scored.
            request = replace(request, prompt={**request.prompt, "cache_salt": self._salt(request)})
        run = await run_engine(self._engine, request)
        run.check(request.first_row)
        return EngineResult(run.rows[request.first_row :], run.num_cached_tokens, run.output)

    async def _run_cached(self, request: RowsRequest, token_ids: np.ndarray) -> EngineResult:
        salt = self._salt(request)
        engine_salt = f"scoremode-{self._process}-{self._store.generation}-{salt}"
        salted = replace(request, token_ids=token_ids, prompt={**request.prompt, "cache_salt": engine_salt})
        # Keys and values do not depend on what is wanted of the rows.
        computed = block_hashes = self._store.hashes(token_ids, self._identity(request, salt))
        if request.first_row // self.block_size == len(computed):
            # No whole block has rows that are needed.
            block_hashes = []
        elif (of_rows := request.spec.identity) is not None:
            block_hashes = self._store.hashes(token_ids, self._identity(request, salt, of_rows))
        num_computed = self._num_computed(computed)
        cached = CachedRequest(self._engine, self._store, self._in_flight, salted, block_hashes, num_computed)
        run = await cached.run()
        rows = run.rows[request.first_row :]
        self._metrics.hits.inc(cached.num_hits)
        self._metrics.misses.inc(len(rows) - cached.num_hits)
        self._metrics.joined.inc(cached.has_waited)
        self._metrics.evictions.inc(cached.num_evicted)
        self._metrics.cache_bytes.set(self._store.num_bytes)
        if not cached.is_current:
            # These hashes are of an earlier generation, whose JSON may be of other weights.
            block_hashes = []
        num_cached_blocks = min(len(block_hashes), -(-run.first // self.block_size))
        return EngineResult(rows, cached.num_cached_tokens, run.output, block_hashes, num_cached_blocks)

    def _num_computed(self, block_hashes: Sequence[bytes]) -> int:
        """Tokens of the first blocks whose keys and values other requests have computed or compute. From now on this
        request computes those of the rest."""
        num_blocks = len(list(takewhile(self._computed.__contains__, block_hashes)))
        self._computed.update(dict.fromkeys(block_hashes[num_blocks:]))
        while len(self._computed) > MAX_COMPUTED:
            self._computed.popitem(last=False)
        return num_blocks * self.block_size

    def _identity(self, request: RowsRequest, salt: str, of_rows: tuple[Any, ...] | None = None) -> str:
        """Everything except the tokens that keys and values depend on, or with a `RowSpec.identity`, rows."""
        lora = request.options.get("lora_request")
        adapter = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        return repr((self._store.generation, adapter, salt, of_rows))

    def _salt(self, request: RowsRequest) -> str:
        salt = request.prompt.get("cache_salt") or ""
        if not request.owner:
            return salt
        # Short, because some of vLLM's connectors use it in file names.
        return blake2b(f"{request.owner}.{salt}".encode(), digest_size=HASH_BYTES).hexdigest()


def make_store(config: VllmConfig, max_bytes: int) -> RowStore:
    """A store of at most `max_bytes` for an engine. It is off if the engine has no prefix cache, or if its weights may
    change without notice. Hits in vLLM's prefix cache end at multiples of its block size.
    """
    settings = config.cache_config
    is_on = settings.enable_prefix_caching and not may_go_unnoticed(config)
    return RowStore(settings.prefix_match_unit or settings.block_size, max_bytes if is_on else 0)
