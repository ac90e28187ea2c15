"""Scores token sequences on the engine, and lets the event loop read new requests between answers. Texts and HTTP are
handled elsewhere."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from scoremode.wire.protocol import Lane, LaneFields
from scoremode_server.engine.engine import ScoringEngine
from scoremode_server.engine.sequence import EnginePass, ScoreSettings
from scoremode_server.errors import RequestError
from scoremode_server.rows import Rows
from scoremode_server.vllm_compat.scheduler import has_lanes

WRITTEN_AT_ONCE = 32_768
"""Limit on logprobs that are written as JSON without a break on the event loop. It takes some ten milliseconds."""


class Pacer:
    """Lets a few tasks continue at a time, first come, first served. In between, the event loop reads new requests.
    Without this the engine, which finishes many requests in one step, would wait while all of them are answered, in
    about a millisecond each."""

    def __init__(self, at_once: int = 12) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        """Wait until the caller may run. It then runs until its next await."""
        async with self._places:
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores sequences on the engine, a few answers at a time."""

    engine: ScoringEngine
    pacer: Pacer

    def scores(self, passes: Iterable[EnginePass], settings: ScoreSettings) -> AsyncGenerator[EnginePass, None]:
        """Run passes of sequences of 1 to `max_model_len` tokens, in order, and yield each with its rows. The first
        token has no context, so no row. `passes` is read only as fast as the engine can use them. Closing the generator
        aborts the passes in the engine."""
        return settings.queue.in_order(
            (self._score(index, engine_pass, settings) for index, engine_pass in enumerate(passes)),
            # A sequence with one chunk per step leaves the rest of the step to other sequences.
            loads=math.inf if settings.chunk else 1,
        )

    async def _score(self, index: int, engine_pass: EnginePass, settings: ScoreSettings) -> EnginePass:
        engine_pass.begin(settings, f"{settings.request_id}-{index}", self.engine.block_size)
        if len(engine_pass.token_ids) == 1:
            settings.queue.done(1, 0)
            engine_pass.rows, engine_pass.num_cached_tokens = Rows.empty(0, engine_pass.spec.columns), 0
        else:
            await self.engine.rows(engine_pass)
        await self.pacer.wait()
        return engine_pass


def served_lanes(config: VllmConfig) -> dict[Lane, int]:
    """List the lanes of an engine, with `ScoreSettings.chunk` of each."""
    lanes: dict[Lane, int] = {"prefill": 0}
    if has_lanes(config):
        lanes["decode"] = 1
        if config.num_speculative_tokens:
            lanes["verify"] = 1 + config.num_speculative_tokens
    return lanes


def lane_settings(lanes: Mapping[Lane, int], request: LaneFields) -> dict[str, Any]:
    """Look up the fields of `ScoreSettings` for a request's lane. RequestError if the engine does not have the lane."""
    if request.lane not in lanes:
        raise RequestError(f"lane: this server has {', '.join(lanes)}, not {request.lane}", "lane")
    if request.context is not None and request.lane == "prefill":
        raise RequestError("context: the prefill lane has none; set lane to decode or verify", "context")
    return {"chunk": lanes[request.lane], "context": request.context}


def check_engine(config: VllmConfig, modes: Sequence[str] = ("raw_logprobs", "processed_logprobs")) -> None:
    """Raise ValueError if a setting of the engine changes what logprobs mean. `modes` are the allowed logprobs
    modes."""
    mode = config.model_config.logprobs_mode
    if mode not in modes:
        raise ValueError(f"scoring needs --logprobs-mode {' or '.join(modes)}, got {mode}")
    if config.cache_config.kv_sharing_fast_prefill:
        raise ValueError("scoring needs a server without --kv-sharing-fast-prefill, which makes prompt logprobs wrong")
    if config.lora_config is not None and current_platform.is_cpu():
        # vLLM's CPU kernels apply an adapter of other requests to those without one, and fail for prompt logprobs.
        raise ValueError("scoring on a CPU needs a server without --enable-lora")
