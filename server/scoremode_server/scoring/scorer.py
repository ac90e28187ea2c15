"""Scores token sequences on the engine, and lets the event loop write answers and read new requests by turns. Knows no
text and no HTTP."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils import random_uuid

from scoremode.wire.protocol import Lane, LaneFields
from scoremode_server.engine.admission import RequestQueue
from scoremode_server.engine.engine import ScoredRows, ScoringEngine
from scoremode_server.engine.passes import RowsRequest
from scoremode_server.errors import RequestError
from scoremode_server.rows import Rows
from scoremode_server.vllm_compat.scheduler import has_lanes
from scoremode_server.worker.row_spec import RowSpec

WRITTEN_AT_ONCE = 32_768
"""Logprobs that are written as JSON without a break, in some ten milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """Settings of all sequences of an HTTP request."""

    request_id: str
    queue: RequestQueue
    top_logprobs: int = 0
    temperature: float = 1.0
    use_cache: bool = True
    cache_salt: str | None = None
    owner: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As of `RowsRequest`."""
    chunk: int = 0
    """Tokens per step in a lane other than prefill; 0 in the prefill lane."""
    context: int | None = None
    """Tokens that are prefilled before the first chunk, at most; if None, all before the first wanted row."""
    is_answer: bool = False
    """Whether the wanted rows are of a generated answer, whose first token comes from the step that prefills."""

    def in_lane(self, spec: RowSpec) -> RowSpec:
        """The same rows, none of which comes from a step with more than a chunk of tokens, except an answer's first."""
        if not self.chunk:
            return spec
        most = spec.first if self.is_answer else spec.first - 1
        context = most if self.context is None else min(self.context, most)
        return replace(spec, chunk=self.chunk, context=max(1, context))


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Tokens to score, with the positions and candidates that are wanted."""

    token_ids: Sequence[int]
    first: int = 0
    """The position from which rows are wanted."""
    candidates: np.ndarray | None = None
    """More tokens to score, int32: [m] at all positions, or [n - first, m]."""
    least_top: int = 0
    """Top tokens that the rows have at least."""

    def spec(self, settings: ScoreSettings, block_size: int) -> RowSpec:
        """The rows that the engine's workers compute. Rows before `first` are left out, except those in the same block
        as `first`, if that block can be stored."""
        first, candidates = max(1, self.first), self.candidates
        if candidates is not None and candidates.ndim > 1:
            candidates = candidates[first - self.first :]
        elif not settings.chunk and (block := (first - 1) // block_size) < (len(self.token_ids) - 1) // block_size:
            # A block is stored whole or not at all. Another request may have it in common, and vLLM then leaves it out.
            first = block * block_size + 1
        return settings.in_lane(
            RowSpec(
                first=first,
                num_top=max(settings.top_logprobs, self.least_top),
                temperature=settings.temperature,
                num_candidates=0 if candidates is None else candidates.shape[-1],
                candidates=b"" if candidates is None else candidates.tobytes(),
            )
        )


class Turns:
    """Lets a few tasks continue at a time, first come, first served; in between, the event loop reads new requests. The
    engine finishes many requests in one step, and would wait while all of them are answered, each in about a
    millisecond."""

    def __init__(self, at_once: int = 12) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        """Wait for a turn, which lasts until the caller next awaits something."""
        async with self._places:
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores sequences on the engine, a few answers at a time."""

    engine: ScoringEngine
    turns: Turns

    def scores(self, sequences: Iterable[ScoredSequence], settings: ScoreSettings) -> AsyncGenerator[ScoredRows, None]:
        """Score sequences of 1 to `max_model_len` tokens, in order. The first token has no context, so no row.
        Sequences are taken when the engine can use them. Closing the generator aborts those in the engine."""
        return settings.queue.in_order(
            (self._score(index, sequence, settings) for index, sequence in enumerate(sequences)),
            # A sequence that takes a chunk a step leaves the rest of the step to others.
            loads=math.inf if settings.chunk else 1,
        )

    async def _score(self, index: int, sequence: ScoredSequence, settings: ScoreSettings) -> ScoredRows:
        spec = sequence.spec(settings, self.engine.block_size)
        if len(sequence.token_ids) == 1:
            settings.queue.done(1, 0)
            await self.turns.wait()
            return ScoredRows(Rows.empty(0, spec.columns), 0)
        # Sequences in other lanes share no keys, values or rows, not even with each other.
        use_cache = settings.use_cache and not settings.chunk
        request = RowsRequest.score(
            sequence.token_ids,
            spec,
            request_id=f"{settings.request_id}-{index}",
            first=max(1, sequence.first),
            use_cache=use_cache,
            # Keys and values that no other request may read have a salt of their own.
            cache_salt=settings.cache_salt if use_cache else random_uuid(),
            owner=settings.owner,
            options=settings.options,
            queue=settings.queue,
        )
        result = await self.engine.rows(request)
        await self.turns.wait()
        return result


def served_lanes(config: VllmConfig) -> dict[Lane, int]:
    """List the lanes of an engine, with `ScoreSettings.chunk` of each."""
    lanes: dict[Lane, int] = {"prefill": 0}
    if has_lanes(config):
        lanes["decode"] = 1
        if config.num_speculative_tokens:
            lanes["verify"] = 1 + config.num_speculative_tokens
    return lanes


def lane_settings(lanes: Mapping[Lane, int], request: LaneFields) -> dict[str, Any]:
    """Look up the `ScoreSettings` of a request's lane among those of the engine."""
    if request.lane not in lanes:
        raise RequestError(f"lane: this server has {', '.join(lanes)}, not {request.lane}", "lane")
    if request.context is not None and request.lane == "prefill":
        raise RequestError("context: the prefill lane has none; set lane to decode or verify", "context")
    return {"chunk": lanes[request.lane], "context": request.context}


def check_engine(config: VllmConfig, modes: Sequence[str] = ("raw_logprobs", "processed_logprobs")) -> None:
    """Raise ValueError if a setting of an engine changes what logprobs are. `modes` are those that do not."""
    mode = config.model_config.logprobs_mode
    if mode not in modes:
        raise ValueError(f"scoring needs --logprobs-mode {' or '.join(modes)}, got {mode}")
    if config.cache_config.kv_sharing_fast_prefill:
        raise ValueError("scoring needs a server without --kv-sharing-fast-prefill, which makes prompt logprobs wrong")
    if config.lora_config is not None and current_platform.is_cpu():
        # vLLM's CPU kernels compute requests without an adapter with that of others, and fail at prompt logprobs.
        raise ValueError("scoring on a CPU needs a server without --enable-lora")
