"""vLLM's engine client with a cache of logprobs before it.

vLLM does not read its prefix cache when prompt logprobs are asked for, because positions that it takes from there are
not computed and so have none. Here they are: `CachingEngine` lets it read, and fills in the rows that were computed
when those positions were. What is missing nevertheless is computed; no row is ever anything but what the engine
computed for exactly these tokens.

Scoring requests carry a `cache_salt` of this process and of the cache's generation. So vLLM's prefix cache holds, under
that salt, only what this process has scored since its rows were last dropped: text that was generated, the scores of
another API server, or keys and values of older weights never give a hit for which there are no rows.
"""

import inspect
import secrets
from array import array
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from typing import Any

import numpy as np
from vllm import SamplingParams, envs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from scoremode_server.cache import LogprobCache
from scoremode_server.cached_request import CachedRequest
from scoremode_server.engine.packed_logprobs import is_packed
from scoremode_server.flights import Flights
from scoremode_server.scoring import NO_CACHE

logger = init_logger(f"vllm.{__name__}")

OnCounts = Callable[[LogprobCache], None] | None
"""Who wants to know when a cache's counts may have moved."""

CHANGES = (
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "release_kv_cache_memory",
    "add_lora",
    "remove_lora",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "update_weight_version",
    "collective_rpc",
)
"""The engine's methods behind which rows may be wrong, or are not wanted any more.

`sleep` may discard weights, and `wake_up` comes before they are loaded again. `add_lora` may load other weights under
the name and path of an adapter. `collective_rpc` calls anything in the workers, reloading weights for one.
`reset_prefix_cache` and `release_kv_cache_memory` drop the keys and values that rows belong to.
"""


def make_cache(config: VllmConfig, max_bytes: int) -> LogprobCache:
    """A cache that fits an engine, of at most `max_bytes`; turned off where the engine has no prefix cache, and where
    weights may change without this process hearing of it.

    Hits in vLLM's prefix cache end at multiples of `block_size`: with several kinds of layers at a multiple of all
    their block sizes, of which this is the smallest, or at `prefix_match_unit` where that is set.
    """
    settings = config.cache_config
    block_size = settings.prefix_match_unit or settings.block_size
    # Requests that change weights reach one API server only. They are routes of vLLM's development mode, except for
    # loading adapters, which vLLM refuses where there are several.
    unheard = envs.VLLM_SERVER_DEV_MODE and config.parallel_config._api_process_count > 1
    if unheard and max_bytes:
        logger.warning("No logprobs are cached: VLLM_SERVER_DEV_MODE with several API servers")
    return LogprobCache(block_size, max_bytes if settings.enable_prefix_caching and not unheard else 0)


def clear_on_changes(engine: EngineClient, cache: LogprobCache, on_cleared: OnCounts = None) -> None:
    """Drop the cache's rows before and after every one of `CHANGES`, and tell `on_cleared`; in between it is off.

    Raises:
        RuntimeError: the engine has no such method, so that changes may go unnoticed.
    """
    for name in CHANGES:
        method = getattr(engine, name, None)
        if not inspect.iscoroutinefunction(method):
            raise RuntimeError(f"vLLM's engine has no method {name}, behind which cached logprobs must be dropped")
        setattr(engine, name, _clearing(method, cache, on_cleared))


def _clearing(method: Callable[..., Any], cache: LogprobCache, on_cleared: OnCounts) -> Callable[..., Any]:
    @wraps(method)
    async def changed(*arguments: Any, **settings: Any) -> Any:
        try:
            with cache.change():
                return await method(*arguments, **settings)
        finally:
            if on_cleared is not None:
                on_cleared(cache)

    return changed


def scored_tokens(prompt: Any, params: SamplingParams) -> np.ndarray | None:
    """The tokens of a request that the cache can serve, int32: the prompt, and the token that sampling is forced to.

    None for all others: without packed prompt logprobs, of more than one sample, streamed, with anything but token
    ids, moved between engines, or marked `NO_CACHE`.
    """
    extra = params.extra_args or {}
    if (
        not is_packed(params)
        or NO_CACHE in extra
        or "kv_transfer_params" in extra
        or params.n != 1
        or params.prompt_logprobs is None
        or params.prompt_logprobs < 0
        or params.prompt_logprob_token_ids is not None
        or params.output_kind is not RequestOutputKind.FINAL_ONLY
        or not isinstance(prompt, dict)
        or prompt.get("type") != "token"
    ):
        return None
    try:
        return np.frombuffer(array("i", [*prompt["prompt_token_ids"], *_forced(params)]), np.int32)
    except OverflowError:
        # No vocabulary is that large: the engine says so in its own words.
        return None


def _forced(params: SamplingParams) -> list[int]:
    """The token whose row the sampled step gives, if that is certain before it runs."""
    allowed: list[int] = params.allowed_token_ids or []
    certain = len(allowed) == 1 and params.max_tokens == 1
    return allowed if certain and params.flat_logprobs and params.logprobs == params.prompt_logprobs else []


class CachingEngine:
    """Stands in for vLLM's engine client; scoring requests are answered with the help of a cache, all else is vLLM's.

    `on_counts` is called with the cache after each request that used it.
    """

    def __init__(self, engine: EngineClient, cache: LogprobCache, on_counts: OnCounts = None) -> None:
        self._engine = engine
        self._cache = cache
        self._flights = Flights()
        self._on_counts = on_counts
        self._process = secrets.token_hex(8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """`EngineClient.generate`. A request that the cache serves has one output, at its end.

        Its prompt logprobs are complete, and its `num_cached_tokens` are the tokens that were not computed for it.

        Raises:
            EngineOutputError: the engine did not compute a row that it was asked for.
        """
        token_ids = scored_tokens(prompt, sampling_params) if self._cache.enabled else None
        if token_ids is None or len(token_ids) <= self._cache.block_size:
            outputs: AsyncGenerator[RequestOutput, None] = self._engine.generate(
                prompt, sampling_params, request_id, **options
            )
            return outputs
        # The request is of the generation of this moment, not of the one in which its first output is asked for.
        return self._generate(self._request(token_ids, prompt, sampling_params, request_id, options))

    def _request(
        self, token_ids: np.ndarray, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> CachedRequest:
        lora = options.get("lora_request")
        adapter = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        caller_salt = prompt.get("cache_salt")
        return CachedRequest(
            self._engine,
            self._cache,
            self._flights,
            salt=f"scoremode-{self._process}-{self._cache.generation}-{caller_salt or ''}",
            chain=self._cache.chain(token_ids, adapter, caller_salt),
            prompt=prompt,
            params=params,
            request_id=request_id,
            options=options,
        )

    async def _generate(self, request: CachedRequest) -> AsyncGenerator[RequestOutput, None]:
        output = await request.answer()
        if self._on_counts is not None:
            self._on_counts(self._cache)
        yield output
