"""`/v1/references`: records the served model's distributions over a text, to compare other models with."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.wire.protocol import Reference, ReferenceDeleted, ReferenceList, ReferenceRequest
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ERROR_RESPONSES, ScoremodeRoute
from scoremode_server.api.event_stream import EVENT_RESPONSES, respond
from scoremode_server.api.perplexity import TextRequest, check_texts
from scoremode_server.api.requests import accepted, scoremode_state
from scoremode_server.app import ReferenceParts, ScoremodeState
from scoremode_server.errors import NotServedError, RequestError
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.references.directory import StoredReference
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.text_windows import RunningPerplexity

router = APIRouter(route_class=ScoremodeRoute, tags=["references"])


def references_of(state: ScoremodeState) -> ReferenceParts:
    """What serves the routes of references.

    Raises:
        NotServedError: the server has no folder for them.
    """
    if state.references is None:
        raise NotServedError("this server has no folder for references: start it with --reference-dir DIR", None)
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
    """Remove a reference from disk. Running comparisons with it end with an error."""
    await references_of(scoremode_state(raw_request)).stored.delete(name)
    return ReferenceDeleted(name=name)


@router.post(
    "/v1/references",
    response_model=Reference,
    responses=EVENT_RESPONSES,
    summary="Record the served model as a reference",
)
@load_aware_call
@until_disconnect
async def record_reference(request: ReferenceRequest, raw_request: Request) -> Response:
    """Score a text's windows and store their hidden states. The same request again resumes where it was interrupted."""
    state = scoremode_state(raw_request)
    references = references_of(state)
    state.admission.check()
    with state.admission.until_stopped():
        checked = await check_texts(request, raw_request, state)
        if checked.options["lora_request"] is not None:
            raise RequestError("an adapter cannot be recorded as a reference", "model")
        reference = await references.recorder.begin(request.name, checked.texts, request.corpus)
    in_queue = accepted(state.admission, "/v1/references", checked.request_id)
    events = partial(_events, checked, references, reference, return_ranks=request.return_ranks)
    return await respond(in_queue, events, checked.request_id, stream=request.stream)


async def _events(
    checked: TextRequest,
    references: ReferenceParts,
    reference: StoredReference,
    queue: RequestQueue,
    *,
    return_ranks: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """Each window that was not there before, in order; then the reference with its perplexity. The files of a complete
    one are read too, so that the same request again repairs what is damaged."""
    running = RunningPerplexity(len(checked.texts.windows))
    settings = ScoreSettings(request_id=engine_id(checked.request_id), queue=queue, options=checked.options)
    async with aclosing(references.recorder.record(reference, settings)) as windows:
        async for window in windows:
            so_far = running.add(window.nlls)
            if window.ranks is None:
                continue
            if return_ranks:
                so_far.logprobs, so_far.ranks = (-window.nlls).tolist(), window.ranks.tolist()
            yield so_far.model_dump(exclude=None if return_ranks else {"logprobs", "ranks"})
    await references.recorder.finish(reference, running.nlls)
    yield (await references.stored.describe(reference.name)).model_dump()
