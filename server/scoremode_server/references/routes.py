"""The route `/v1/references` records the served model's distributions over a text, to compare other models with.
`/v1/kld` measures the served model's KL divergence from such a reference, position by position."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.windows import turn_prompts
from scoremode.wire.arrays import encode_array, encode_top_logprobs
from scoremode.wire.protocol import Usage
from scoremode.wire.references import (
    KldRequest,
    KldResponse,
    Reference,
    ReferenceDeleted,
    ReferenceList,
    ReferenceRequest,
    ReferenceRoutes,
    ReferenceWindows,
    RouteAgreement,
    ServedLayers,
)
from scoremode_server.engine.admission import RequestQueue
from scoremode_server.engine.sequence import ScoreSettings, engine_id
from scoremode_server.errors import NotServedError, RequestError
from scoremode_server.http.requests import ERROR_RESPONSES, EVENT_RESPONSES, ScoremodeRoute, accept, until_disconnect
from scoremode_server.http.responses import VALUE_BYTES, ClosingStream, columns_json, in_own_task, respond, top_entries
from scoremode_server.references.answers import answer_windows
from scoremode_server.references.comparer import Comparer, base_file_of, llama_cpp_header
from scoremode_server.references.comparison import Comparison
from scoremode_server.references.exchange import WorkerFiles
from scoremode_server.references.files.directory import ReferenceDirectory
from scoremode_server.references.layers import LayerParts
from scoremode_server.references.recording import Recording
from scoremode_server.references.service import References
from scoremode_server.rows import Rows, json_logprobs
from scoremode_server.scoring.core import Core, prepare
from scoremode_server.scoring.model_files import with_adapter
from scoremode_server.scoring.scorer import lane_settings
from scoremode_server.scoring.text_windows import RunningPerplexity, cut_texts
from scoremode_server.settings import BYTES_AHEAD, WORKER_EXTENSION, reference_directory

ROUTE = "/v1/references"
KLD_ROUTE = "/v1/kld"

router = APIRouter(route_class=ScoremodeRoute, tags=["references"], responses=ERROR_RESPONSES)


@dataclass(frozen=True, slots=True)
class ReferenceParts:
    """`app.state.scoremode_references`, if the server has a folder for references."""

    stored: References
    comparer: Comparer
    layers: LayerParts


def start(core: Core, state: State) -> None:
    """Put the routes' parts into the app's state; None if the server has no folder for references."""
    state.scoremode_references = None
    # References need our methods in the workers.
    is_extended = core.client.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION
    if is_extended and (root := reference_directory()) is not None:
        stored = References(ReferenceDirectory(root), core.identity, "name")
        comparer = Comparer(replace(stored, param="reference"), core, WorkerFiles(core.client, core.admission))
        state.scoremode_references = ReferenceParts(stored, comparer, LayerParts(core))


def references_of(raw_request: Request) -> ReferenceParts:
    """Get the parts that serve the routes. NotServedError if the server has no folder for references."""
    references: ReferenceParts | None = raw_request.app.state.scoremode_references
    if references is None:
        raise NotServedError("this server has no folder for references: start it with --reference-dir DIR", None)
    return references


@router.get(ROUTE, summary="All references")
async def list_references(raw_request: Request) -> ReferenceList:
    """The references in the server's folder, by name."""
    return ReferenceList(data=await references_of(raw_request).stored.all())


@router.get(f"{ROUTE}/{{name}}", summary="Describe a reference")
async def get_reference(name: str, raw_request: Request) -> Reference:
    """One reference, complete or not."""
    return await references_of(raw_request).stored.describe(name)


@router.get(f"{ROUTE}/{{name}}/windows", summary="Where a reference's windows come from")
async def get_windows(name: str, raw_request: Request) -> ReferenceWindows:
    """The document, the label and the role of each window, and how many tokens it has before its targets."""
    stored = references_of(raw_request).stored
    reference = await stored.open(name)
    text, plan = await stored.text(reference), reference.manifest.text
    documents, labels, roles = text.origins.T.tolist()
    prompts = None
    if plan.roles:
        turns = ((document, *text.window(index)) for index, document in enumerate(documents))
        prompts = await asyncio.to_thread(turn_prompts, turns)
    return ReferenceWindows(
        name=name,
        text_fingerprint=plan.fingerprint,
        num_context=text.num_context.tolist(),
        documents=documents,
        labels=[plan.labels[index] for index in labels] if plan.labels else None,
        roles=[plan.roles[index] for index in roles] if plan.roles else None,
        prompts=prompts,
    )


@router.delete(f"{ROUTE}/{{name}}", summary="Delete a reference")
async def delete_reference(name: str, raw_request: Request) -> ReferenceDeleted:
    """Remove a reference from disk. Running comparisons with it end with an error."""
    await references_of(raw_request).stored.delete(name)
    return ReferenceDeleted(name=name)


@router.post(
    ROUTE, response_model=Reference, responses=EVENT_RESPONSES, summary="Record the served model as a reference"
)
@until_disconnect
async def record_reference(request: ReferenceRequest, raw_request: Request) -> Response:
    """Score a text's windows and store their hidden states. The same request again resumes where it was interrupted."""
    references = references_of(raw_request)
    async with prepare(raw_request, request.model) as (core, model, options):
        if request.answers is not None:
            # In a thread: answers have millions of tokens.
            texts = await asyncio.to_thread(answer_windows, request, request.answers, core.limits)
            num_texts = len(request.answers.data)
        else:
            texts = await cut_texts(request, core)
            num_texts = len(request.conversations) if request.messages is not None else len(request.texts or [""])
        if request.labels is not None and len(request.labels) != num_texts:
            raise RequestError(f"labels has {len(request.labels)} labels for {num_texts} texts", "labels")
        recording = await Recording.begin(
            references.stored, references.comparer, references.layers, request, texts, is_adapted=model.lora is not None
        )
    num_windows = len(texts.windows)
    # All of the text is on disk now. In memory each token would take 40 bytes until the last window is recorded.
    del texts
    request.prompt = request.texts = request.messages = request.answers = None
    request_id = f"ppl-{raw_request.state.request_id}"

    async def events(queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each newly recorded window in order, then the reference with its perplexity. The files of a complete
        reference are read too, so that sending the request again repairs damaged ones."""
        running = RunningPerplexity(num_windows)
        settings = ScoreSettings(request_id=engine_id(request_id), queue=queue, options=options)
        async with aclosing(recording.windows(settings)) as windows:
            async for nlls, ranks in windows:
                so_far = running.add(nlls)
                if ranks is not None:
                    if request.return_ranks:
                        so_far.logprobs, so_far.ranks = (-nlls).tolist(), ranks.tolist()
                    yield so_far.model_dump(exclude_none=True)
        yield (await recording.finish(running.nlls, settings)).model_dump()

    return await respond(core.admission, ROUTE, request_id, events, stream=request.stream)


@router.get(
    f"{ROUTE}/{{name}}/llama.cpp",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
    summary="A reference as the base file of llama-perplexity",
    description="The file that `llama-perplexity --kl-divergence-base FILE --kl-divergence` reads. The reference must "
    "have been\nrecorded with method `llama.cpp`. `first` leaves out the header and the windows before it. If the "
    "server cannot\ncontinue, it closes the connection.",
)
@until_disconnect
async def export_reference(name: str, raw_request: Request, first: int = 0) -> Response:
    """Stream the file, from window `first` on."""
    references = references_of(raw_request)
    async with prepare(raw_request, None) as (core, _, options):
        reference = await references.comparer.open(name)
        num_windows, header = reference.manifest.text.num_windows, llama_cpp_header(reference)
        if not 0 <= first < num_windows:
            raise RequestError(f"first: {first} is not one of the reference's {num_windows} windows", "first")
    request_id = f"export-{raw_request.state.request_id}"

    async def parts(queue: RequestQueue) -> AsyncGenerator[memoryview, None]:
        settings = ScoreSettings(request_id=engine_id(request_id), queue=queue, options=options)
        async with aclosing(references.comparer.export(reference, range(first, num_windows), settings)) as in_order:
            async for rows in in_order:
                yield rows.data.cast("B")

    layout = base_file_of(reference)
    headers = {"Content-Length": str(layout.size - layout.end_of(first))}
    written = in_own_task(accept(core.admission, f"{ROUTE}/llama.cpp", request_id), parts)
    # Errors in the first window still get an HTTP status.
    beginning: bytes | memoryview = await anext(written)
    if not first:
        beginning = b"".join((header, beginning))
    return ClosingStream(written, beginning, media_type="application/octet-stream", headers=headers)


@router.get("/v1/layers", summary="How the served model's decoder layers can be cut")
async def get_layers(raw_request: Request) -> ServedLayers:
    """The blocks between the boundaries of the residual stream, as a reference recorded with `layers` has them, and the
    free space for references."""
    references = references_of(raw_request)
    layers = await references.layers.served()
    return ServedLayers(**layers.model_dump(), free_bytes=await references.stored.free_bytes())


@router.post(
    KLD_ROUTE,
    response_model=KldResponse,
    responses=EVENT_RESPONSES,
    summary="KL divergence of the served model from a reference",
)
@until_disconnect
async def create_kld(request: KldRequest, raw_request: Request) -> Response:
    """Score windows of a reference with the served model, and compare the distributions over the whole vocabulary."""
    references = references_of(raw_request)
    async with prepare(raw_request, request.model) as (core, model, options):
        core.limits.check_top_logprobs(request.top_logprobs)
        comparison = await Comparison.begin(
            references.comparer, references.layers, request, is_adapted=model.lora is not None
        )
        num_values = comparison.num_values
        # Streamed windows are written one at a time.
        at_once = [max(num_values)] if request.stream else num_values
        core.limits.check_num_values(at_once, request.encoding_format, "windows")
        lane = lane_settings(core.lanes, request)
        # A stream holds computed windows that the client has not read yet.
        ahead = max(*at_once, BYTES_AHEAD // VALUE_BYTES["base64"])
        held = (min(sum(num_values), ahead), "base64") if request.stream else (sum(num_values), request.encoding_format)
        await core.answers.reserve(raw_request, *held)
    request_id = f"kld-{raw_request.state.request_id}"

    write_window = partial(_window, request, comparison.routes)

    async def events(queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each window, then the answer without `data`."""
        settings = ScoreSettings(
            request_id=engine_id(request_id),
            queue=queue,
            # The top tokens of both models are always compared.
            top_logprobs=max(1, request.top_logprobs),
            options=options,
            prefills_first_target=comparison.reference.manifest.answers is not None,
            **lane,
        )
        async with aclosing(comparison.rows(settings)) as in_order:
            async for index, rows in in_order:
                yield await asyncio.to_thread(write_window, index, rows, comparison.positions[index])
        figures = await comparison.figures()
        yield {
            "id": request_id,
            "object": "kld",
            "created": int(time.time()),
            "model": model.name,
            "reference": comparison.reference.name,
            "fingerprint": await with_adapter(references.stored.model.fingerprint, model.lora),
            "windows": [comparison.windows.start, comparison.windows.stop],
            "num_scored": figures["num_scored"],
            "statistics": figures,
            "usage": Usage(prompt_tokens=comparison.num_tokens, cached_tokens=0, total_tokens=comparison.num_tokens),
            **({"lane": request.lane, "mean_batch": queue.mean_batch} if request.lane != "prefill" else {}),
        }

    return await respond(core.admission, KLD_ROUTE, request_id, events, stream=request.stream, with_windows=True)


def _window(
    request: KldRequest, routes: ReferenceRoutes | None, index: int, rows: Rows, positions: KldPositions
) -> dict[str, Any]:
    """A compared window; `routes` has the reference's, if they are compared."""
    encoded = request.encoding_format == "base64"
    content: dict[str, Any] = {"object": "kld.window", "index": index, "num_scored": len(positions)}
    for name, dtype in POSITION_DTYPES.items():
        values = getattr(positions, name)
        if encoded:
            content[name] = encode_array(values, dtype)
        elif name.endswith("logprobs"):
            content[name] = json_logprobs(values)
        else:
            # Write the digits of float64: the shortest digits of a float32 read back as another number.
            content[name] = values.astype(np.float64 if dtype == "<f4" else np.int32)
    if request.statistics:
        names = (side + name for side in ("", "reference_") for name in request.statistics)
        content["columns"] = columns_json(rows, names, request.encoding_format)
    if routes is not None:
        content["routes"] = _agreement(rows, routes.top_k, encoded=encoded)
    if request.top_logprobs:
        write: Callable[..., Any] = encode_top_logprobs if encoded else top_entries
        content["top_logprobs"] = write(rows.token_ids[:, 1:], rows.logprobs[:, 1:])
        sides = rows.column("reference_token_ids"), rows.column("reference_logprobs")
        content["reference_top_logprobs"] = write(*(side[:, 1:] for side in sides))
    return content


def _agreement(rows: Rows, top_k: int, *, encoded: bool) -> RouteAgreement:
    """Count how often the experts of a window's targets are the reference's."""
    pairs = rows.column("expert_agreement").view(np.int16)
    shared, same_first = pairs[:, ::2], pairs[:, 1::2]
    differing = (shared < top_k).sum(1)
    return {
        "same_set": (shared == top_k).sum(0).tolist(),
        "same_first": same_first.sum(0).tolist(),
        "shared": shared.sum(0).tolist(),
        "differing_layers": encode_array(differing, "<i4") if encoded else differing.tolist(),
    }
