"""Scores token sequences on the engine. Knows neither text nor HTTP."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput

from scoremode_server.prefix_cache.engine import Answer, ScoringEngine
from scoremode_server.prefix_cache.run import RowsRequest
from scoremode_server.rows import Rows
from scoremode_server.scoring.turns import Turns

T = TypeVar("T")


class Scorer:
    """Scores sequences on the engine, a few answers at a time."""

    def __init__(self, engine: ScoringEngine, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str,
        first: int = 1,
        top_logprobs: int = 0,
        use_cache: bool = True,
        lora: LoRARequest | None = None,
    ) -> Answer:
        """Score the tokens from position `first` on of a sequence of at least one and at most `max_model_len` tokens of
        the vocabulary. The first token has no context, so no row. Cancelling the caller aborts the engine's request.

        Raises:
            EngineOutputError: the engine returned something that is not the score of this sequence.
        """
        if len(token_ids) == 1:
            nothing = RequestOutput(request_id, None, list(token_ids), None, [], finished=True)
            return Answer(Rows.empty(0, top_logprobs + 1), nothing)
        answer = await self._engine.rows(
            RowsRequest.score(
                token_ids,
                request_id=request_id,
                first=first,
                top_logprobs=top_logprobs,
                use_cache=use_cache,
                options={"lora_request": lora},
            )
        )
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


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once; the first failure cancels the others, so that no engine request outlives it."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
