"""`POST /v1/score`: exact log-probabilities of prompts, or of continuations of them."""

import base64
import math
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call
from vllm.utils import random_uuid

from scoremode.protocol import ScoreRequest, ScoreResponse, ServerInfo
from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.api.responses import json_response, until_disconnect
from scoremode_server.api.sequences import RequestedSequence, read_sequences
from scoremode_server.app import scoremode_state
from scoremode_server.rows import Rows, json_logprobs
from scoremode_server.scoring.scorer import gather
from scoremode_server.scoring.token_strings import TokenStrings

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
    response_model=ScoreResponse,
    responses=ERROR_RESPONSES,
    summary="Log-probabilities of given text",
)
@until_disconnect
@load_aware_call
async def create_score(request: ScoreRequest, raw_request: Request) -> Response:
    """Score every token of every prompt, or every token of every continuation of every prompt."""
    state = scoremode_state(raw_request)
    state.limits.check_top_logprobs(request.top_logprobs)
    model = await state.models.resolve(request.model)
    sequences = await read_sequences(request, state.tokenizer)
    for sequence in sequences:
        state.limits.check_sequence(sequence.token_ids, sequence.name)
    request_id = f"score-{random_uuid()}"
    scores = await gather(
        [
            state.scorer.score(
                sequence.token_ids,
                request_id=f"{request_id}-{index}",
                first=max(1, sequence.first),
                top_logprobs=request.top_logprobs,
                use_cache=request.use_cache,
                lora=model.lora,
            )
            for index, sequence in enumerate(sequences)
        ]
    )
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    return json_response(
        {
            "id": request_id,
            "object": "score",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"index": index, **_result(request, state.tokenizer.strings, sequence, score.rows)}
                for index, (sequence, score) in enumerate(zip(sequences, scores, strict=True))
            ],
            "usage": {
                "prompt_tokens": num_tokens,
                "cached_tokens": sum(score.num_cached_tokens for score in scores),
                "total_tokens": num_tokens,
            },
        }
    )


def _result(request: ScoreRequest, strings: TokenStrings, sequence: RequestedSequence, rows: Rows) -> dict[str, Any]:
    """One entry of `data`."""
    token_ids = sequence.token_ids[sequence.first :]
    # A prompt's first token has no context, and so no row.
    without_row = [None] * (len(token_ids) - len(rows))
    scored = json_logprobs(rows.logprobs[:, 0])
    result: dict[str, Any] = {
        "prompt_index": sequence.prompt_index,
        "continuation_index": sequence.continuation_index,
        "token_ids": token_ids,
        "logprobs": _logprobs(request, len(without_row), rows, scored),
        "sum_logprob": math.fsum(scored),
        "num_scored": len(rows),
    }
    if request.return_ranks or request.continuations is not None:
        result["ranks"] = [*without_row, *rows.ranks.tolist()]
        result["is_greedy"] = bool((rows.ranks == 1).all())
    if request.return_tokens:
        result["tokens"] = strings.of(token_ids)
    if request.top_logprobs:
        result["top_logprobs"] = [*without_row, *_top_logprobs(request, strings, rows)]
    return result


def _logprobs(request: ScoreRequest, num_without: int, rows: Rows, scored: np.ndarray) -> str | np.ndarray:
    """The actual tokens' logprobs, NaN where there is no row: JSON null, or little-endian float32 as OpenAI's
    embeddings are sent."""
    if request.encoding_format == "float":
        values: np.ndarray = np.concatenate([np.full(num_without, np.nan), scored])
        return values
    values = np.concatenate([np.full(num_without, np.nan, np.float32), rows.logprobs[:, 0]])
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _top_logprobs(request: ScoreRequest, strings: TokenStrings, rows: Rows) -> list[list[dict[str, Any]]]:
    """The likeliest tokens at each position."""
    top: list[list[dict[str, Any]]] = []
    for token_ids, logprobs in zip(
        rows.token_ids[:, 1:].tolist(), json_logprobs(rows.logprobs[:, 1:]).tolist(), strict=True
    ):
        entries = [{"token_id": id_, "logprob": value} for id_, value in zip(token_ids, logprobs, strict=True)]
        if request.return_tokens:
            for entry, token in zip(entries, strings.of(token_ids), strict=True):
                entry["token"] = token
        top.append(entries)
    return top
