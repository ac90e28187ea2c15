"""Score mode: token sequences in, exact log-probabilities out, through vLLM's engine and `SamplingParams` alone.

To score the tokens t[0..n) the engine is fed t[:-1]. Prompt logprobs give every target but the last; the one sampled
step is forced to emit t[-1], and its raw logprob is the last target's. So no token that nobody asked for is generated,
and a sequence as long as the model's context fits.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from scoremode_server.engine.packed_logprobs import PACKED, PackedLogprobs
from scoremode_server.errors import EngineOutputError
from scoremode_server.turns import Turns

NO_CACHE = "scoremode_no_cache"
"""The mark in `SamplingParams.extra_args` of a request that is computed whole and leaves nothing behind."""

NO_RANK = 0
"""Stands in `SequenceScore.ranks` where a token has none; ranks count from 1."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Scores of one sequence of n tokens; every array runs over its tokens.

    A sequence's first token has no context, so it has no logprob: NaN, with rank `NO_RANK`.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    """[n] float32, nats: log p(t_i | t_<i)."""
    ranks: np.ndarray
    """[n] int32: how many tokens of the vocabulary are at least as likely, 1 for the likeliest."""
    top_token_ids: np.ndarray
    """[n, k] int32, likeliest first."""
    top_logprobs: np.ndarray
    """[n, k] float32, nats."""
    num_cached_tokens: int
    """Tokens whose keys and values the engine took from its prefix cache."""


def score_params(token_ids: Sequence[int], top_logprobs: int = 0, *, use_cache: bool = True) -> SamplingParams:
    """The `SamplingParams` that score `token_ids` when `token_ids[:-1]` is the prompt.

    `top_logprobs` adds the k likeliest tokens at every position, and costs time; the actual token's logprob and rank
    always come. `use_cache` lets a server's logprob cache answer. `read_score` turns the request's output into arrays.

    Raises:
        ValueError: fewer than two tokens, so that there is no token with a context.
    """
    if len(token_ids) < 2:
        raise ValueError(f"scoring needs at least 2 tokens, got {len(token_ids)}")
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=top_logprobs,
        logprobs=top_logprobs,
        flat_logprobs=True,
        allowed_token_ids=[token_ids[-1]],
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={PACKED: 1} if use_cache else {PACKED: 1, NO_CACHE: 1},
        skip_clone=True,
    )


def read_score(token_ids: Sequence[int], top_logprobs: int, output: RequestOutput) -> SequenceScore:
    """The scores of `token_ids` in the output of a request made with `score_params`.

    Raises:
        EngineOutputError: the output is not of these tokens, is incomplete, or has a NaN.
    """
    completion = output.outputs[0]
    if not isinstance(output.prompt_logprobs, PackedLogprobs | FlatLogprobs) or completion.logprobs is None:
        raise EngineOutputError(f"the engine ended a request without logprobs ({completion.finish_reason})")
    width = top_logprobs + 1
    before, last = columns(output.prompt_logprobs, width), columns(completion.logprobs, width)
    ids, logprobs, ranks = (np.concatenate(parts) for parts in zip(before, last, strict=True))
    if not np.array_equal(ids[:, 0], token_ids[1:]):
        raise EngineOutputError("the engine returned logprobs of other tokens than were asked for")
    if np.isnan(logprobs).any():
        position = 1 + int(np.argmax(np.isnan(logprobs).any(axis=1)))
        raise EngineOutputError(f"the model's logprob at position {position} is NaN")
    return SequenceScore(
        token_ids=list(token_ids),
        logprobs=_behind_first(logprobs[:, 0], np.nan),
        ranks=_behind_first(ranks, NO_RANK),
        top_token_ids=_behind_first(ids[:, 1:], NO_RANK),
        top_logprobs=_behind_first(logprobs[:, 1:], np.nan),
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def columns(logprobs: PackedLogprobs | FlatLogprobs, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids and logprobs, [positions, actual token and top k], and the ranks of the actual tokens, [positions]."""
    if isinstance(logprobs, PackedLogprobs):
        return logprobs.arrays(width)
    return (
        np.asarray(logprobs.token_ids, np.int32).reshape(-1, width),
        np.asarray(logprobs.logprobs, np.float32).reshape(-1, width),
        np.asarray(logprobs.ranks[::width], np.int32),
    )


def _behind_first(rows: np.ndarray, fill: float) -> np.ndarray:
    """`rows`, which start at a sequence's second token, behind a row for the first."""
    return np.concatenate([np.full_like(rows, fill, shape=(1, *rows.shape[1:])), rows])


def unscored(token_ids: Sequence[int], top_logprobs: int) -> SequenceScore:
    """The score of a sequence of one token, which has nothing to score."""
    shape = (len(token_ids), top_logprobs)
    return SequenceScore(
        token_ids=list(token_ids),
        logprobs=np.full(shape[:1], np.nan, np.float32),
        ranks=np.full(shape[:1], NO_RANK, np.int32),
        top_token_ids=np.full(shape, NO_RANK, np.int32),
        top_logprobs=np.full(shape, np.nan, np.float32),
        num_cached_tokens=0,
    )


def check_engine(config: VllmConfig) -> None:
    """Refuse an engine whose settings make logprobs something else.

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


class Scorer:
    """Scores token sequences on an engine. Knows sampling parameters and outputs; knows neither text nor HTTP."""

    def __init__(self, engine: EngineClient, turns: Turns) -> None:
        check_engine(engine.vllm_config)
        self._engine = engine
        self._turns = turns

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str,
        top_logprobs: int = 0,
        use_cache: bool = True,
        lora: LoRARequest | None = None,
    ) -> SequenceScore:
        """Score one sequence of at least one and at most `max_model_len` tokens of the vocabulary.

        Cancelling the caller aborts the engine's request.

        Raises:
            EngineOutputError: the engine returned something that is not the score of this sequence.
        """
        if len(token_ids) == 1:
            return unscored(token_ids, top_logprobs)
        outputs = self._engine.generate(
            tokens_input(list(token_ids[:-1])),
            score_params(token_ids, top_logprobs, use_cache=use_cache),
            request_id,
            lora_request=lora,
        )
        output = await final_output(outputs)
        await self._turns.take()
        return read_score(token_ids, top_logprobs, output)


async def final_output(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The last output of a request, which has all of it.

    Raises:
        EngineOutputError: there is none.
    """
    final = None
    async for output in outputs:
        final = output
    if final is None:
        raise EngineOutputError("the engine ended a request without an output")
    return final


def is_unfinished(output: RequestOutput) -> bool:
    """Whether the engine gave the request up, so that its output lacks rows."""
    return output.outputs[0].finish_reason in ("abort", "error")


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Await all at once; the first failure cancels the others, so that no engine request outlives it."""
    if len(awaitables) == 1:
        return [await awaitables[0]]

    async def run(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(awaitable)) for awaitable in awaitables]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
