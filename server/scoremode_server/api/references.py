"""`/v1/references`: records the served model's distributions over a text, to compare other models with."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.wire.references import Reference, ReferenceDeleted, ReferenceList, ReferenceRequest
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ERROR_RESPONSES, ScoremodeRoute
from scoremode_server.api.event_stream import EVENT_RESPONSES, respond
from scoremode_server.api.requests import scoremode_state
from scoremode_server.app import ReferenceParts
from scoremode_server.errors import NotServedError, RequestError
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.text_windows import RunningPerplexity, cut_texts

ROUTE = "/v1/references"

router = APIRouter(route_class=ScoremodeRoute, tags=["references"])


def references_of(raw_request: Request) -> ReferenceParts:
    """What serves the routes of references.

    Raises:
        NotServedError: the server has no folder for them.
    """
    references = scoremode_state(raw_request).references
    if references is None:
        raise NotServedError("this server has no folder for references: start it with --reference-dir DIR", None)
    return references


@router.get(ROUTE, response_model=ReferenceList, responses=ERROR_RESPONSES, summary="All references")
async def list_references(raw_request: Request) -> ReferenceList:
    """The references in the server's folder, by name."""
    return ReferenceList(data=await references_of(raw_request).stored.all())


@router.get(
    f"{ROUTE}/{{name}}", response_model=Reference, responses=ERROR_RESPONSES, summary="What is known of a reference"
)
async def get_reference(name: str, raw_request: Request) -> Reference:
    """One reference, complete or not."""
    return await references_of(raw_request).stored.describe(name)


@router.delete(
    f"{ROUTE}/{{name}}", response_model=ReferenceDeleted, responses=ERROR_RESPONSES, summary="Delete a reference"
)
async def delete_reference(name: str, raw_request: Request) -> ReferenceDeleted:
    """Remove a reference from disk. Running comparisons with it end with an error."""
    await references_of(raw_request).stored.delete(name)
    return ReferenceDeleted(name=name)


@router.post(
    ROUTE, response_model=Reference, responses=EVENT_RESPONSES, summary="Record the served model as a reference"
)
@until_disconnect
@load_aware_call
async def record_reference(request: ReferenceRequest, raw_request: Request) -> Response:
    """Score a text's windows and store their hidden states. The same request again resumes where it was interrupted."""
    state, references = scoremode_state(raw_request), references_of(raw_request)
    state.admission.check()
    with state.admission.until_stopped():
        model = await state.models.resolve(request.model)
        texts = await cut_texts(request, state.tokenizer, state.limits, state.info)
        if model.lora is not None:
            raise RequestError("an adapter cannot be recorded as a reference", "model")
        options = await state.models.engine_options(raw_request, model)
        reference = await references.recorder.begin(request.name, texts, request.corpus)
    request_id = f"ppl-{raw_request.state.request_id}"

    async def events(queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
        """Each window that was not there before, in order; then the reference with its perplexity. The files of a
        complete one are read too, so that the same request again repairs what is damaged."""
        running = RunningPerplexity(len(texts.windows))
        settings = ScoreSettings(request_id=engine_id(request_id), queue=queue, options=options)
        async with aclosing(references.recorder.record(reference, settings)) as windows:
            async for window in windows:
                so_far = running.add(window.nlls)
                if window.ranks is None:
                    continue
                if request.return_ranks:
                    so_far.logprobs, so_far.ranks = (-window.nlls).tolist(), window.ranks.tolist()
                yield so_far.model_dump(exclude=None if request.return_ranks else {"logprobs", "ranks"})
        await references.recorder.finish(reference, running.nlls)
        yield (await references.stored.describe(reference.name)).model_dump()

    return await respond(state.admission, ROUTE, request_id, events, stream=request.stream)
