"""`POST /v1/perplexity`: the perplexity of a text, which the server cuts into windows."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from scoremode.metrics import perplexity, text_metrics
from scoremode.wire.protocol import PerplexityRequest, PerplexityResponse, Usage
from scoremode_server.engine.admission import RequestQueue
from scoremode_server.engine.passes import engine_id
from scoremode_server.http.requests import ERROR_RESPONSES, EVENT_RESPONSES, ScoremodeRoute, prepared, until_disconnect
from scoremode_server.http.responses import respond
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import ScoredSequence, ScoreSettings
from scoremode_server.scoring.text_windows import RunningPerplexity, TextWindows, cut_texts

ROUTE = "/v1/perplexity"

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"], responses=ERROR_RESPONSES)


@router.post(ROUTE, response_model=PerplexityResponse, responses=EVENT_RESPONSES, summary="Perplexity of given text")
@until_disconnect
async def create_perplexity(request: PerplexityRequest, raw_request: Request) -> Response:
    """Score a text's windows and sum them up; with `stream`, an event for each window on the way."""
    async with prepared(raw_request, request.model) as (state, model, options):
        conversations = None if request.messages is None else await state.conversations.sequences(request)
        texts = await cut_texts(request, conversations, state.tokenizer, state.limits, state.info)
        lane = state.lanes.settings(request)
    request_id = f"ppl-{raw_request.state.request_id}"

    async def events(queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
        settings = ScoreSettings(
            request_id=engine_id(request_id),
            queue=queue,
            cache_salt=request.cache_salt,
            owner=state.owner(raw_request.headers),
            options=options,
            **lane,
        )

        def sequences() -> Iterator[ScoredSequence]:
            """The windows, each counted when it begins."""
            for token_ids, first in texts:
                queue.add(1, len(token_ids))
                yield ScoredSequence(token_ids, first)

        running, num_cached = RunningPerplexity(len(texts.windows)), 0
        async with aclosing(state.scorer.scores(sequences(), settings)) as answers:
            async for answer in answers:
                num_cached += answer.num_cached_tokens
                window = running.add(-json_logprobs(answer.rows.logprobs[:, 0]))
                yield window.model_dump(exclude={"logprobs", "ranks"})
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

    return await respond(state.admission, ROUTE, request_id, events, stream=request.stream)


def _figures(texts: TextWindows, running: RunningPerplexity) -> dict[str, Any]:
    """The fields of a `PerplexityResponse` that texts and NLLs decide."""
    result = perplexity(np.concatenate(running.nlls).tolist())
    counts: dict[str, Any] = {name: getattr(texts, name) for name in ("num_tokens", "num_bytes", "num_words")}
    of_text: dict[str, Any] = {"bits_per_byte": None, "word_perplexity": None}
    if counts["num_bytes"] is not None:
        of_text = asdict(text_metrics(result, texts.method, **counts))
    return {
        "method": texts.method,
        "context_length": texts.context_length,
        "stride": texts.stride,
        "num_windows": len(texts.windows),
        **asdict(result),
        **of_text,
        **counts,
    }
