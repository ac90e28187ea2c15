"""`POST /v1/perplexity`: a text's perplexity, cut into windows here, whole or as a stream of progress."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import fsum
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.metrics import count_words, exp, perplexity, text_metrics
from scoremode.protocol import PerplexityRequest, PerplexityResponse, PerplexityWindow, ServerInfo, Usage
from scoremode.windows import Window, WindowError, cut_windows, resolve_context_length, resolve_stride
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.api.event_stream import EventStream
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.api.responses import json_response
from scoremode_server.api.score import ERROR_RESPONSES
from scoremode_server.app import ScoremodeState
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import ScoredSequence, ScoreSettings

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"])


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of one text, the text that they are of, None where only token ids were given, and its windows."""

    token_ids: list[int]
    text: str | None
    windows: list[Window] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """A checked request, and what came of it so far."""

    request: PerplexityRequest
    request_id: str
    model_name: str
    owner: str
    options: dict[str, Any]
    context_length: int
    stride: int
    documents: list[Document]
    num_cached_tokens: int = 0
    """Of the windows so far, those that were not computed for this request."""
    nlls: list[np.ndarray] = field(default_factory=list)
    """Of each window so far, [num_scored] float64 in nats."""

    @property
    def windows(self) -> list[Window]:
        """Of all documents."""
        return [window for document in self.documents for window in document.windows]

    @property
    def num_windows(self) -> int:
        """Of all documents."""
        return sum(len(document.windows) for document in self.documents)

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_bytes(self) -> int | None:
        """Of the UTF-8 of all texts; None where there are only token ids."""
        return sum(len(document.text.encode()) for document in self.documents if document.text) or None

    @property
    def num_words(self) -> int | None:
        """Of all texts; None where there are only token ids."""
        return sum(count_words(document.text) for document in self.documents if document.text) or None


class Progress:
    """Sums over the windows so far."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows
        self._index = 0
        self._nll_sum = 0.0
        self._num_scored = 0

    def add(self, nlls: np.ndarray) -> PerplexityWindow:
        """What to tell of the next window, whose targets have these NLLs [num_scored] in nats."""
        nll_sum, index = fsum(nlls), self._index
        self._index += 1
        self._nll_sum += nll_sum
        self._num_scored += len(nlls)
        return PerplexityWindow(
            index=index,
            num_windows=self._num_windows,
            num_scored=len(nlls),
            nll_sum=nll_sum,
            perplexity=exp(self._nll_sum / self._num_scored),
            total_scored=self._num_scored,
        )


@router.post(
    "/v1/perplexity",
    response_model=PerplexityResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **ERROR_RESPONSES},
    summary="Perplexity of given text",
)
@load_aware_call
@until_disconnect
async def create_perplexity(request: PerplexityRequest, raw_request: Request) -> Response:
    """Score a text's windows and sum them up; with `stream`, an event for each window on the way."""
    state = scoremode_state(raw_request)
    state.admission.check()
    with state.admission.until_stopped():
        job = await prepare(request, raw_request, state)
    in_queue = accepted(state.admission, "/v1/perplexity", job.request_id)
    if request.stream:
        return EventStream(in_queue, partial(_contents, job, state), job.request_id)
    async with in_queue as queue, aclosing(_scored_windows(job, state, queue)) as windows:
        async for _ in windows:
            pass
        return json_response((await asyncio.to_thread(_response, job)).model_dump())


async def prepare(request: PerplexityRequest, raw_request: Request, state: ScoremodeState) -> Job:
    """Check a request, tokenize its texts and cut their windows.

    Raises:
        RequestError: a field is at fault, or the text is too short for the method.
    """
    model = await state.models.resolve(request.model)
    try:
        context_length = resolve_context_length(request.method, request.context_length, state.limits.max_model_len)
        stride = resolve_stride(request.method, context_length, request.stride)
        documents = await _documents(request, state)
        num_windows = sum(len(document.token_ids) // stride + 1 for document in documents)
        state.limits.check_num_windows(num_windows, stride)
        # In a thread: a long text with a short stride has windows by the ten thousand.
        documents = await asyncio.to_thread(_cut, request, documents, context_length, stride, state.info)
    except WindowError as error:
        raise RequestError(str(error), error.field) from None
    if not any(document.windows for document in documents):
        raise RequestError(
            f"no token can be scored: {_field(request)} has {sum(len(document.token_ids) for document in documents)} "
            f"tokens, too few for method {request.method!r} with context_length {context_length}",
            _field(request),
        )
    return Job(
        request=request,
        request_id=f"ppl-{raw_request.state.request_id}",
        model_name=model.name,
        owner=owner_of(raw_request),
        options=await state.models.engine_options(raw_request, model),
        context_length=context_length,
        stride=stride,
        documents=documents,
    )


def _cut(
    request: PerplexityRequest, documents: list[Document], context_length: int, stride: int, info: ServerInfo
) -> list[Document]:
    """Documents, which share no context, with their windows."""

    def cut(num_tokens: int) -> list[Window]:
        return cut_windows(
            num_tokens,
            request.method,
            context_length,
            stride,
            prefix_token_id=info.prefix_token_id,
            bos_token_id=info.chunk_token_id,
        )

    return [replace(document, windows=cut(len(document.token_ids))) for document in documents]


def _field(request: PerplexityRequest) -> str:
    return "prompt" if request.texts is None else "texts"


async def _documents(request: PerplexityRequest, state: ScoremodeState) -> list[Document]:
    """The texts of a request, cut off after `max_tokens` tokens in all."""
    if (request.prompt is None) == (request.texts is None):
        raise RequestError("give either prompt, one text, or texts, several", "prompt")
    if isinstance(request.prompt, list):
        whole = [Document(request.prompt, None)]
    else:
        texts = [request.prompt] if request.prompt is not None else request.texts or []
        encoded = await state.tokenizer.encode_all(texts, request.adds_special_tokens) if texts else []
        whole = [Document(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    for document in whole:
        if document.token_ids:
            state.limits.check_vocabulary(document.token_ids, _field(request))
    return await _cut_off(whole, request.max_tokens, request.adds_special_tokens, state)


async def _cut_off(
    documents: list[Document], max_tokens: int | None, adds_special_tokens: bool, state: ScoremodeState
) -> list[Document]:
    """The first `max_tokens` tokens of documents, with the text that they are of."""
    if max_tokens is None:
        return documents
    kept = []
    for document in documents:
        token_ids = document.token_ids[:max_tokens]
        max_tokens -= len(token_ids)
        if len(token_ids) < len(document.token_ids) and document.text is not None:
            special = adds_special_tokens and token_ids[:1] == [state.info.chunk_token_id]
            document = Document(token_ids, await state.tokenizer.decode(token_ids[special:]) if token_ids else "")
        kept.append(Document(token_ids, document.text))
    return kept


async def _scored_windows(job: Job, state: ScoremodeState, queue: RequestQueue) -> AsyncGenerator[np.ndarray, None]:
    """The NLLs of each window's targets in nats, window by window."""
    settings = ScoreSettings(
        request_id=engine_id(job.request_id),
        queue=queue,
        cache_salt=job.request.cache_salt,
        makes_room=False,
        owner=job.owner,
        options=job.options,
    )
    async with aclosing(state.scorer.scores(_sequences(job, queue), settings)) as answers:
        async for answer in answers:
            job.num_cached_tokens += answer.num_cached_tokens
            job.nlls.append(-json_logprobs(answer.rows.logprobs[:, 0]))
            yield job.nlls[-1]


def _sequences(job: Job, queue: RequestQueue) -> Iterator[ScoredSequence]:
    """The windows, each counted in when it is begun."""
    for document in job.documents:
        for window in document.windows:
            token_ids = window.token_ids(document.token_ids)
            queue.add(1, len(token_ids))
            yield ScoredSequence(token_ids, window.first_scored)


async def _contents(job: Job, state: ScoremodeState, queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
    """Each window, in order; then the result."""
    progress = Progress(job.num_windows)
    async with aclosing(_scored_windows(job, state, queue)) as windows:
        async for nlls in windows:
            yield progress.add(nlls).model_dump(exclude={"logprobs", "ranks"})
    yield (await asyncio.to_thread(_response, job)).model_dump()


def _response(job: Job) -> PerplexityResponse:
    """The result of a finished run."""
    result = perplexity(np.concatenate(job.nlls).tolist())
    num_tokens, num_bytes, num_words = job.num_tokens, job.num_bytes, job.num_words
    of_text: dict[str, Any] = {"bits_per_byte": None, "word_perplexity": None}
    if num_bytes is not None and num_words is not None:
        of_text = asdict(
            text_metrics(result, job.request.method, num_tokens=num_tokens, num_bytes=num_bytes, num_words=num_words)
        )
    fed = sum(window.num_tokens for window in job.windows)
    return PerplexityResponse(
        id=job.request_id,
        created=int(time.time()),
        model=job.model_name,
        method=job.request.method,
        context_length=job.context_length,
        stride=job.stride,
        **asdict(result),
        **of_text,
        num_tokens=num_tokens,
        num_windows=job.num_windows,
        num_bytes=num_bytes,
        num_words=num_words,
        usage=Usage(prompt_tokens=fed, cached_tokens=job.num_cached_tokens, total_tokens=fed),
    )
