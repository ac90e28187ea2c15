"""Defines the scoring routes. `/v1/score` returns log-probabilities of prompts, of continuations of prompts, or of
turns of conversations. `/v1/turns` returns the tokens of these turns, `/v1/tokens` the texts of token ids.
`/v1/perplexity` cuts texts into windows and returns their perplexity."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from scoremode.metrics import perplexity, text_metrics
from scoremode.wire.arrays import encode_array, encode_top_logprobs
from scoremode.wire.protocol import (
    PerplexityRequest,
    PerplexityResponse,
    ScoreRequest,
    ScoreResponse,
    ServerInfo,
    TokensRequest,
    TokensResponse,
    TurnsRequest,
    TurnsResponse,
    Usage,
)
from scoremode_server.engine.admission import RequestQueue
from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence, engine_id
from scoremode_server.http.requests import ERROR_RESPONSES, EVENT_RESPONSES, ScoremodeRoute, accept, until_disconnect
from scoremode_server.http.responses import columns_json, json_response, padded, respond, top_entries
from scoremode_server.rows import NO_TOKEN, Rows, json_logprobs, num_words
from scoremode_server.scoring.core import Core, prepare
from scoremode_server.scoring.model_files import with_adapter
from scoremode_server.scoring.scorer import WRITTEN_AT_ONCE, lane_settings
from scoremode_server.scoring.sequences import read_sequences
from scoremode_server.scoring.text_windows import RunningPerplexity, TextWindows, cut_texts
from scoremode_server.scoring.tokenizer import TokenStrings

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"], responses=ERROR_RESPONSES)


@router.post(
    "/v1/perplexity", response_model=PerplexityResponse, responses=EVENT_RESPONSES, summary="Perplexity of given text"
)
@until_disconnect
async def create_perplexity(request: PerplexityRequest, raw_request: Request) -> Response:
    """Score a text's windows and sum up their NLLs. If `stream` is set, each window is sent as an event when scored."""
    async with prepare(raw_request, request.model) as (core, model, options):
        texts = await cut_texts(request, core)
        lane = lane_settings(core.lanes, request)
    request_id = f"ppl-{raw_request.state.request_id}"

    async def events(queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
        settings = ScoreSettings(
            request_id=engine_id(request_id),
            queue=queue,
            cache_salt=request.cache_salt,
            owner=core.owner(raw_request.headers),
            options=options,
            **lane,
        )

        def passes() -> Iterator[EnginePass]:
            """Make a pass of each window, and count the window when its pass begins."""
            for token_ids, first in texts:
                queue.add(1, len(token_ids))
                yield EnginePass(TokenSequence(context=token_ids, first=first))

        running, num_cached = RunningPerplexity(len(texts.windows)), 0
        async with aclosing(core.scorer.scores(passes(), settings)) as answers:
            async for answer in answers:
                num_cached += answer.num_cached_tokens
                window = running.add(-json_logprobs(answer.rows.logprobs[:, 0]))
                yield window.model_dump(exclude_none=True)
        figures = await asyncio.to_thread(_figures, texts, running)
        num_fed = sum(window.num_tokens for window in texts.windows)
        usage = Usage(prompt_tokens=num_fed, cached_tokens=num_cached, total_tokens=num_fed)
        yield PerplexityResponse(
            id=request_id,
            created=int(time.time()),
            model=model.name,
            usage=usage,
            lane=request.lane,
            mean_batch=queue.mean_batch,
            **figures,
        ).model_dump()

    return await respond(core.admission, "/v1/perplexity", request_id, events, stream=request.stream)


@router.get("/v1/score", summary="What is served")
async def score_info(raw_request: Request, model: str | None = None) -> ServerInfo:
    """Describe the model or the LoRA adapter `model`: its limits, its special tokens, and what computes its scores."""
    core: Core = raw_request.app.state.scoremode
    served = await core.models.resolve(model)
    fingerprint = await with_adapter(core.identity.fingerprint, served.lora)
    return core.info.model_copy(update={"fingerprint": fingerprint})


@router.post("/v1/score", response_model=ScoreResponse, summary="Log-probabilities of given text")
@until_disconnect
async def create_score(request: ScoreRequest, raw_request: Request) -> Response:
    """Score the tokens of prompts, of continuations of prompts, or of turns of conversations."""
    async with prepare(raw_request, request.model) as (core, model, options):
        core.limits.check_top_logprobs(request.top_logprobs)
        sequences, pass_of_each = await read_sequences(request, core)
    passes = list(dict.fromkeys(pass_of_each))
    num_tokens = sum(engine_pass.sequence.num_tokens for engine_pass in passes)
    # A sink's figure counts as a logprob.
    num_values = [
        sequence.num_targets * (1 + sequence.num_candidates + request.top_logprobs + num_words(sequence.sink_columns))
        for sequence in sequences
    ]
    core.limits.check_num_values(num_values, request.encoding_format)
    lane = lane_settings(core.lanes, request)
    request_id = f"score-{raw_request.state.request_id}"
    async with accept(core.admission, "/v1/score", request_id, len(passes), num_tokens) as queue:
        await core.answers.reserve(raw_request, sum(num_values), request.encoding_format)
        settings = ScoreSettings(
            request_id=engine_id(request_id),
            queue=queue,
            top_logprobs=request.top_logprobs,
            temperature=request.temperature,
            use_cache=request.use_cache,
            cache_salt=request.cache_salt,
            owner=core.owner(raw_request.headers),
            options=options,
            **lane,
        )
        num_cached = sum([answer.num_cached_tokens async for answer in core.scorer.scores(passes, settings)])

        def write() -> Response:
            results = map(partial(_result, request, core.tokenizer.strings), sequences, pass_of_each)
            return json_response(
                {
                    "id": request_id,
                    "object": "score",
                    "created": int(time.time()),
                    "model": model.name,
                    "data": [{"index": index, **result} for index, result in enumerate(results)],
                    "usage": Usage(prompt_tokens=num_tokens, cached_tokens=num_cached, total_tokens=num_tokens),
                    **({"lane": request.lane, "mean_batch": queue.mean_batch} if request.lane != "prefill" else {}),
                }
            )

        # Write inside the request, so that a server that shuts down waits for the answer.
        return await asyncio.to_thread(write) if sum(num_values) > WRITTEN_AT_ONCE else write()


@router.post("/v1/turns", response_model=TurnsResponse, summary="Tokens of conversations")
@until_disconnect
async def create_turns(request: TurnsRequest, raw_request: Request) -> Response:
    """Render conversations with the chat template, and find where each scored turn is among their tokens."""
    async with prepare(raw_request, request.model) as (core, _, _):
        sequences = await core.conversations.sequences(request, are_prompts=request.add_generation_prompt)
        await core.answers.reserve(raw_request, sum(len(sequence["token_ids"]) for sequence in sequences), "float")
        return json_response({"object": "turns", "data": sequences})


@router.post("/v1/tokens", response_model=TokensResponse, summary="Texts of single tokens")
async def create_tokens(request: TokensRequest, raw_request: Request) -> Response:
    """Decode each token alone. An incomplete character becomes U+FFFD, and its bytes are in `bytes`."""
    core: Core = raw_request.app.state.scoremode
    await core.models.resolve(request.model)
    core.limits.check_token_list(request.token_ids)
    tokens = await asyncio.to_thread(core.tokenizer.texts_of, request.token_ids)
    contents = await asyncio.to_thread(core.tokenizer.bytes_of, request.token_ids, tokens)
    return json_response({"object": "tokens", "tokens": tokens, "bytes": contents})


def _figures(texts: TextWindows, running: RunningPerplexity) -> dict[str, Any]:
    """Compute the fields of a `PerplexityResponse` that follow from texts and NLLs."""
    result = perplexity(np.concatenate(running.nlls).tolist())
    counts: dict[str, Any] = {name: getattr(texts, name) for name in ("num_tokens", "num_bytes", "num_words")}
    return {
        "method": texts.method,
        "context_length": texts.context_length,
        "stride": texts.stride,
        "num_windows": len(texts.windows),
        **asdict(result),
        **asdict(text_metrics(result, texts.method, **counts)),
        **counts,
    }


def _result(
    request: ScoreRequest, strings: TokenStrings, sequence: TokenSequence, scored_by: EnginePass
) -> dict[str, Any]:
    """Make the entry of a sequence in the answer's `data`."""
    token_ids, rows = sequence.targets, scored_by.rows
    # A prompt's first token has no context, so no row.
    num_without = len(token_ids) - len(rows)
    logprobs = rows.logprobs[:, 0]
    if sequence.column:
        logprobs = np.append(logprobs[:-1], rows.logprobs[-1, sequence.column])
    scored = json_logprobs(logprobs)
    candidate_logprobs = rows.logprobs[:, 1 : 1 + sequence.num_candidates]
    first_top = 1 + scored_by.num_candidates
    top = slice(first_top, first_top + request.top_logprobs)
    top_ids, top_logprobs = rows.token_ids[:, top], rows.logprobs[:, top]
    result: dict[str, Any] = {
        "prompt_index": sequence.prompt_index,
        "continuation_index": sequence.continuation_index,
        "token_ids": token_ids,
        "sum_logprob": math.fsum(scored),
        "num_scored": len(rows),
    }
    if request.return_ranks:
        result["ranks"] = [*[None] * num_without, *rows.ranks.tolist()]
    if request.return_ranks or sequence.continuation_index is not None:
        result["is_greedy"] = _is_greedy(rows, sequence, first_top)
    if request.return_tokens:
        result["tokens"] = strings.texts_of(token_ids)
    if sequence.sink_columns:
        names = (column.name for column in sequence.sink_columns)
        result["columns"] = columns_json(rows, names, request.encoding_format, num_without)
    if request.encoding_format == "base64":
        result["logprobs"] = encode_array(padded(logprobs, num_without), "<f4")
        if sequence.candidates is not None:
            chosen = padded(candidate_logprobs, num_without)
            result["candidate_logprobs"] = {"shape": list(chosen.shape), "logprobs": encode_array(chosen, "<f4")}
        if request.top_logprobs:
            padded_ids = padded(top_ids, num_without, NO_TOKEN)
            result["top_logprobs"] = encode_top_logprobs(padded_ids, padded(top_logprobs, num_without))
        return result
    result["logprobs"] = padded(scored, num_without)
    if sequence.candidates is not None:
        result["candidate_logprobs"] = [*[None] * num_without, *json_logprobs(candidate_logprobs).tolist()]
    if request.top_logprobs:
        texts = strings.texts_of if request.return_tokens else None
        result["top_logprobs"] = [*[None] * num_without, *top_entries(top_ids, top_logprobs, texts)]
    return result


def _is_greedy(rows: Rows, sequence: TokenSequence, first_top: int) -> bool:
    """Whether each target is more likely than all other tokens."""
    if not sequence.column:
        return bool((rows.ranks == 1).all())
    # The last token is a candidate in the last row of a shared pass, so that row's rank is another token's.
    first, second = rows.logprobs[-1, first_top : first_top + 2]
    is_last_greedy = rows.token_ids[-1, first_top] == sequence.last_token and first > second
    return bool(is_last_greedy and (rows.ranks[:-1] == 1).all())
