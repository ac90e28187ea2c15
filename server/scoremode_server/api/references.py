"""`/v1/references`: the served model's distributions over a text, recorded to compare other models with."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.protocol import PerplexityWindow, Reference, ReferenceDeleted, ReferenceList, ReferenceRequest
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.api.event_stream import EventStream
from scoremode_server.api.perplexity import Job, Progress, prepare
from scoremode_server.api.requests import accepted, scoremode_state
from scoremode_server.api.responses import json_response
from scoremode_server.api.score import ERROR_RESPONSES
from scoremode_server.app import ReferenceParts, ScoremodeState
from scoremode_server.errors import NotServedError, RequestError
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.references.directory import StoredReference, StoredText
from scoremode_server.references.manifest import TextPlan, text_fingerprint
from scoremode_server.scoring.scorer import ScoreSettings

router = APIRouter(route_class=ScoremodeRoute, tags=["references"])


def references_of(state: ScoremodeState) -> ReferenceParts:
    """What serves the routes of references.

    Raises:
        NotServedError: the server was started without a folder for them.
    """
    if state.references is None:
        raise NotServedError("this server keeps no references: start it with --reference-dir DIR", None)
    return state.references


@router.get("/v1/references", response_model=ReferenceList, responses=ERROR_RESPONSES, summary="All references")
async def list_references(raw_request: Request) -> ReferenceList:
    """The references in the server's folder, by name."""
    return ReferenceList(data=await references_of(scoremode_state(raw_request)).stored.all())


@router.get(
    "/v1/references/{name}", response_model=Reference, responses=ERROR_RESPONSES, summary="What is known of a reference"
)
async def get_reference(name: str, raw_request: Request) -> Reference:
    """One reference, complete or not."""
    return await references_of(scoremode_state(raw_request)).stored.describe(name)


@router.delete(
    "/v1/references/{name}", response_model=ReferenceDeleted, responses=ERROR_RESPONSES, summary="Delete a reference"
)
async def delete_reference(name: str, raw_request: Request) -> ReferenceDeleted:
    """Remove a reference from disk. Comparisons with it that are under way end with an error."""
    await references_of(scoremode_state(raw_request)).stored.delete(name)
    return ReferenceDeleted(name=name)


@router.post(
    "/v1/references",
    response_model=Reference,
    responses={200: {"content": {"text/event-stream": {}}}, **ERROR_RESPONSES},
    summary="Record the served model as a reference",
)
@load_aware_call
@until_disconnect
async def record_reference(request: ReferenceRequest, raw_request: Request) -> Response:
    """Score a text's windows and keep their hidden states. The same request again goes on where it was interrupted."""
    state = scoremode_state(raw_request)
    references = references_of(state)
    state.admission.check()
    with state.admission.until_stopped():
        job = await prepare(request, raw_request, state)
        if job.options["lora_request"] is not None:
            raise RequestError("an adapter cannot be recorded as a reference", "model")
        text, plan = await asyncio.to_thread(_plan, job)
        reference = await references.recorder.begin(request.name, plan, text, request.corpus)
    in_queue = accepted(state.admission, "/v1/references", job.request_id)
    if request.stream:
        contents = partial(_contents, job, state, reference, return_ranks=request.return_ranks)
        return EventStream(in_queue, contents, job.request_id)
    async with in_queue as queue, aclosing(_recorded_windows(job, state, reference, queue)) as windows:
        async for _ in windows:
            pass
    return json_response((await references.stored.describe(request.name)).model_dump())


def _plan(job: Job) -> tuple[StoredText, TextPlan]:
    """What is kept of the text and its windows."""
    text = StoredText.of([(document.token_ids, document.windows) for document in job.documents])
    method = job.request.method
    plan = TextPlan(
        fingerprint=text_fingerprint(text.token_ids, text.windows, method),
        method=method,
        context_length=job.context_length,
        stride=job.stride,
        num_tokens=len(text.token_ids),
        num_windows=len(text.windows),
        num_scored=sum(window.num_scored for window in job.windows),
        num_bytes=job.num_bytes,
        num_words=job.num_words,
    )
    return text, plan


async def _recorded_windows(
    job: Job, state: ScoremodeState, reference: StoredReference, queue: RequestQueue, *, return_ranks: bool = False
) -> AsyncGenerator[PerplexityWindow, None]:
    """Progress with each window that was not there before. At the end the reference has its perplexity. The files of a
    complete one are read too, so that asking again mends what was damaged."""
    recorder = references_of(state).recorder
    progress = Progress(job.num_windows)
    settings = ScoreSettings(request_id=engine_id(job.request_id), queue=queue, options=job.options)
    async with aclosing(recorder.record(reference, settings)) as windows:
        async for window in windows:
            job.nlls.append(window.nlls)
            so_far = progress.add(window.nlls)
            if window.ranks is not None:
                if return_ranks:
                    so_far.logprobs, so_far.ranks = (-window.nlls).tolist(), window.ranks.tolist()
                yield so_far
    await recorder.finish(reference, job.nlls)


async def _contents(
    job: Job, state: ScoremodeState, reference: StoredReference, queue: RequestQueue, *, return_ranks: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Each window, in order; then the reference."""
    recorded = _recorded_windows(job, state, reference, queue, return_ranks=return_ranks)
    async with aclosing(recorded) as windows:
        async for window in windows:
            yield window.model_dump(exclude=None if return_ranks else {"logprobs", "ranks"})
    yield (await references_of(state).stored.describe(reference.name)).model_dump()
