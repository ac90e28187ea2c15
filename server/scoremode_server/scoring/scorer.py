"""Scores token sequences on the engine. Knows neither text nor HTTP."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.utils import random_uuid

from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.engine import Answer, ScoringEngine
from scoremode_server.prefix_cache.run import RowsRequest
from scoremode_server.rows import Rows
from scoremode_server.scoring.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """What the sequences of one HTTP request have in common."""

    request_id: str
    queue: RequestQueue
    top_logprobs: int = 0
    use_cache: bool = True
    cache_salt: str | None = None
    makes_room: bool = True
    """Whether rows are kept in the place of others."""
    owner: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `generate`."""


class Scorer:
    """Scores sequences on the engine, a few answers at a time."""

    def __init__(self, engine: ScoringEngine, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns

    def scores(
        self, sequences: Iterable[tuple[Sequence[int], int]], settings: ScoreSettings
    ) -> AsyncGenerator[Answer, None]:
        """Score each sequence of at least one and at most `max_model_len` tokens of the vocabulary, from a position on.
        The first token has no context, so no row. Sequences are taken as the engine can use them, and answers are in
        their order. Closing the generator aborts what is in the engine.

        Raises:
            EngineOutputError: the engine returned something that is not the score of a sequence.
            RequestError: the engine has died, or the server stops.
        """
        return settings.queue.in_order(
            self._score(index, token_ids, first, settings) for index, (token_ids, first) in enumerate(sequences)
        )

    async def _score(self, index: int, token_ids: Sequence[int], first: int, settings: ScoreSettings) -> Answer:
        if len(token_ids) == 1:
            nothing = RequestOutput(settings.request_id, None, list(token_ids), None, [], finished=True)
            answer = Answer(Rows.empty(0, settings.top_logprobs + 1), nothing)
            settings.queue.done(1, 0)
        else:
            # Keys and values that nobody may read again have a salt of their own.
            salt = settings.cache_salt if settings.use_cache else random_uuid()
            request = RowsRequest.score(
                token_ids,
                request_id=f"{settings.request_id}-{index}",
                first=max(1, first),
                top_logprobs=settings.top_logprobs,
                use_cache=settings.use_cache,
                cache_salt=salt,
                makes_room=settings.makes_room,
                owner=settings.owner,
                options=settings.options,
                queue=settings.queue,
            )
            answer = await self._engine.rows(request)
        await self._turns.take()
        return answer


def check_engine(config: VllmConfig) -> None:
    """Refuse an engine whose settings change what logprobs are.

    Raises:
        ValueError: the setting, and what it would do.
    """
    mode = config.model_config.logprobs_mode
    if mode != "raw_logprobs":
        raise ValueError(
            f"scoring needs --logprobs-mode raw_logprobs, got {mode}: the last token of a sequence is scored by a step "
            "that allows that token only, and a processed logprob of it would always be 0"
        )
    if config.cache_config.kv_sharing_fast_prefill:
        raise ValueError("scoring needs a server without --kv-sharing-fast-prefill, which makes prompt logprobs wrong")
