"""`POST /v1/score`: exact log-probabilities of prompts, or of continuations behind them."""

import base64
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.utils import random_uuid

from scoremode.protocol import ScoreRequest, ScoreResponse, ServerInfo
from scoremode_server.errors import ScoremodeRoute
from scoremode_server.responses import ArrayJSONResponse, json_logprobs
from scoremode_server.scoring import NO_RANK, SequenceScore, gather
from scoremode_server.state import ScoremodeState, scoremode_state
from scoremode_server.targets import Target, plan_targets
from scoremode_server.text import TextCodec

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"])

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is at fault; `param` names the field."},
    404: {"model": ErrorResponse, "description": "No such model."},
    "4XX": {"model": ErrorResponse, "description": "Any other error of the request's, such as a missing API key."},
}


@router.get("/v1/score", response_model=ServerInfo, summary="What is served")
async def score_info(raw_request: Request) -> ServerInfo:
    """The model, its bounds, its special tokens and the versions that score it."""
    return scoremode_state(raw_request).info


@router.post(
    "/v1/score",
    dependencies=[Depends(validate_json_request)],
    response_model=ScoreResponse,
    responses=ERROR_RESPONSES,
    summary="Log-probabilities of given text",
)
@with_cancellation
@load_aware_call
async def create_score(request: ScoreRequest, raw_request: Request) -> Response:
    """Score every token of every prompt, or every token of every continuation behind every prompt."""
    state = scoremode_state(raw_request)
    state.limits.check_top_logprobs(request.top_logprobs)
    model = await state.models.resolve(request.model)
    targets = await plan_targets(request, state.codec)
    for target in targets:
        state.limits.check_sequence(target.token_ids, target.name)
    request_id = f"score-{random_uuid()}"
    scores = await gather(
        [
            state.scorer.score(
                target.token_ids,
                request_id=f"{request_id}-{index}",
                top_logprobs=request.top_logprobs,
                use_cache=request.use_cache,
                lora=model.lora,
            )
            for index, target in enumerate(targets)
        ]
    )
    num_tokens = sum(len(target.token_ids) for target in targets)
    return ArrayJSONResponse(
        {
            "id": request_id,
            "object": "score",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"index": index, **_result(request, state, target, score)}
                for index, (target, score) in enumerate(zip(targets, scores, strict=True))
            ],
            "usage": {
                "prompt_tokens": num_tokens,
                "cached_tokens": sum(score.num_cached_tokens for score in scores),
                "total_tokens": num_tokens,
            },
        }
    )


def _result(request: ScoreRequest, state: ScoremodeState, target: Target, score: SequenceScore) -> dict[str, Any]:
    """One entry of `data`."""
    token_ids = target.token_ids[target.first :]
    logprobs = score.logprobs[target.first :]
    scored = json_logprobs(logprobs[~np.isnan(logprobs)])
    result: dict[str, Any] = {
        "prompt_index": target.prompt_index,
        "continuation_index": target.continuation_index,
        "token_ids": token_ids,
        "logprobs": _base64(logprobs) if request.encoding_format == "base64" else json_logprobs(logprobs),
        "sum_logprob": math.fsum(scored),
        "num_scored": len(scored),
    }
    if request.return_ranks or request.continuations is not None:
        ranks = score.ranks[target.first :]
        result["ranks"] = [None if rank == NO_RANK else rank for rank in ranks.tolist()]
        result["is_greedy"] = bool((ranks[ranks != NO_RANK] == 1).all())
    if request.return_tokens:
        result["tokens"] = state.codec.strings.of(token_ids)
    if request.top_logprobs:
        result["top_logprobs"] = list(_top_logprobs(request, state.codec, target, score))
    return result


def _base64(logprobs: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's embeddings are sent."""
    return base64.b64encode(logprobs.astype("<f4").tobytes()).decode("ascii")


def _top_logprobs(
    request: ScoreRequest, codec: TextCodec, target: Target, score: SequenceScore
) -> Iterator[list[dict[str, Any]] | None]:
    """The likeliest tokens at each position, None where there is no context."""
    rows = zip(
        score.ranks[target.first :].tolist(),
        score.top_token_ids[target.first :].tolist(),
        json_logprobs(score.top_logprobs[target.first :]).tolist(),
        strict=True,
    )
    for rank, token_ids, logprobs in rows:
        if rank == NO_RANK:
            yield None
            continue
        entries = [{"token_id": id_, "logprob": value} for id_, value in zip(token_ids, logprobs, strict=True)]
        if request.return_tokens:
            for entry, token in zip(entries, codec.strings.of(token_ids), strict=True):
                entry["token"] = token
        yield entries
