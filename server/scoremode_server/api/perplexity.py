"""`POST /v1/perplexity`: the perplexity of a text, which the server cuts into windows."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.metrics import perplexity, text_metrics
from scoremode.wire.protocol import PerplexityRequest, PerplexityResponse, Usage
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.api.event_stream import EVENT_RESPONSES, respond
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.app import ScoremodeState
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import ScoredSequence, ScoreSettings
from scoremode_server.scoring.text_windows import RunningPerplexity, TextWindows, cut_texts

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"])


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A checked request for the windows of texts."""

    request: PerplexityRequest
    request_id: str
    model_name: str
    owner: str
    options: dict[str, Any]
    texts: TextWindows


@router.post(
    "/v1/perplexity", response_model=PerplexityResponse, responses=EVENT_RESPONSES, summary="Perplexity of given text"
)
@load_aware_call
@until_disconnect
async def create_perplexity(request: PerplexityRequest, raw_request: Request) -> Response:
    """Score a text's windows and sum them up; with `stream`, an event for each window on the way."""
    state = scoremode_state(raw_request)
    state.admission.check()
    with state.admission.until_stopped():
        checked = await check_texts(request, raw_request, state)
    in_queue = accepted(state.admission, "/v1/perplexity", checked.request_id)
    return await respond(in_queue, partial(_events, checked, state), checked.request_id, stream=request.stream)


async def check_texts(request: PerplexityRequest, raw_request: Request, state: ScoremodeState) -> TextRequest:
    """Check a request, tokenize its texts and cut their windows."""
    model = await state.models.resolve(request.model)
    return TextRequest(
        request=request,
        request_id=f"ppl-{raw_request.state.request_id}",
        model_name=model.name,
        texts=await cut_texts(request, state.tokenizer, state.limits, state.info),
        owner=owner_of(raw_request),
        options=await state.models.engine_options(raw_request, model),
    )


async def _events(
    checked: TextRequest, state: ScoremodeState, queue: RequestQueue
) -> AsyncGenerator[dict[str, Any], None]:
    """Each window, in order; then the result."""
    settings = ScoreSettings(
        request_id=engine_id(checked.request_id),
        queue=queue,
        cache_salt=checked.request.cache_salt,
        may_evict=False,
        owner=checked.owner,
        options=checked.options,
    )
    running, num_cached = RunningPerplexity(len(checked.texts.windows)), 0
    async with aclosing(state.scorer.scores(_sequences(checked.texts, queue), settings)) as answers:
        async for answer in answers:
            num_cached += answer.num_cached_tokens
            window = running.add(-json_logprobs(answer.rows.logprobs[:, 0]))
            yield window.model_dump(exclude={"logprobs", "ranks"})
    yield (await asyncio.to_thread(_response, checked, running, num_cached)).model_dump()


def _sequences(texts: TextWindows, queue: RequestQueue) -> Iterator[ScoredSequence]:
    """The windows, each counted in when it is begun."""
    for token_ids, first in texts:
        queue.add(1, len(token_ids))
        yield ScoredSequence(token_ids, first)


def _response(checked: TextRequest, running: RunningPerplexity, num_cached: int) -> PerplexityResponse:
    texts = checked.texts
    result = perplexity(np.concatenate(running.nlls).tolist())
    num_tokens, num_bytes, num_words = texts.num_tokens, texts.num_bytes, texts.num_words
    of_text: dict[str, Any] = {"bits_per_byte": None, "word_perplexity": None}
    if num_bytes is not None and num_words is not None:
        of_text = asdict(
            text_metrics(result, texts.method, num_tokens=num_tokens, num_bytes=num_bytes, num_words=num_words)
        )
    fed = sum(window.num_tokens for window in texts.windows)
    return PerplexityResponse(
        id=checked.request_id,
        created=int(time.time()),
        model=checked.model_name,
        method=texts.method,
        context_length=texts.context_length,
        stride=texts.stride,
        **asdict(result),
        **of_text,
        num_tokens=num_tokens,
        num_windows=len(texts.windows),
        num_bytes=num_bytes,
        num_words=num_words,
        usage=Usage(prompt_tokens=fed, cached_tokens=num_cached, total_tokens=fed),
    )
