"""`POST /v1/kld`: the KL divergence of the served model from a reference, position by position."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.wire.protocol import KldRequest, KldResponse, NoiseFloor
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import ScoremodeRoute
from scoremode_server.api.event_stream import EVENT_RESPONSES, respond
from scoremode_server.api.references import references_of
from scoremode_server.api.requests import accepted, scoremode_state
from scoremode_server.api.responses import as_base64, top_arrays, top_entries
from scoremode_server.app import ScoremodeState
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.prefix_cache.run import engine_id
from scoremode_server.references.directory import StoredReference
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.model_identity import with_adapter
from scoremode_server.scoring.reference_windows import WindowComparison
from scoremode_server.scoring.scorer import ScoreSettings

router = APIRouter(route_class=ScoremodeRoute, tags=["references"])


@dataclass(frozen=True, slots=True)
class KldJob:
    """A checked request."""

    request: KldRequest
    request_id: str
    model_name: str
    options: dict[str, Any]
    reference: StoredReference
    first: int
    last: int
    """One more than the last window."""

    @property
    def indices(self) -> list[int]:
        """The windows, in the order in which they run. A noise floor reverses it, so that each window is computed
        with other windows than when it was recorded."""
        windows = list(range(self.first, self.last))
        return windows[::-1] if self.request.as_noise_floor else windows


@router.post(
    "/v1/kld",
    response_model=KldResponse,
    responses=EVENT_RESPONSES,
    summary="KL divergence of the served model from a reference",
)
@load_aware_call
@until_disconnect
async def create_kld(request: KldRequest, raw_request: Request) -> Response:
    """Score windows of a reference with the served model, and compare the distributions over the whole vocabulary."""
    state = scoremode_state(raw_request)
    references_of(state)
    state.admission.check()
    state.limits.check_top_logprobs(request.top_logprobs)
    with state.admission.until_stopped():
        job = await _prepare(request, raw_request, state)
    in_queue = accepted(state.admission, "/v1/kld", job.request_id)
    events = partial(_events, job, state)
    return await respond(in_queue, events, job.request_id, stream=request.stream, with_windows=True)


async def _prepare(request: KldRequest, raw_request: Request, state: ScoremodeState) -> KldJob:
    model = await state.models.resolve(request.model)
    references = references_of(state)
    reference = await references.stored.open(request.reference)
    await references.comparer.check(reference, state.limits.vocab_size, state.limits.max_model_len)
    num_windows = reference.manifest.text.num_windows
    first, last = request.windows or (0, num_windows)
    if not 0 <= first < last <= num_windows:
        raise RequestError(
            f"windows must be [first, last) within the {num_windows} of the reference, not {[first, last]}", "windows"
        )
    if request.as_noise_floor:
        if (first, last) != (0, num_windows):
            raise RequestError("a noise floor is of all windows", "windows")
        if not references.stored.model.may_continue(reference.manifest.model) or model.lora is not None:
            raise RequestError(
                "a noise floor is of the reference's own model, and this server serves another", "as_noise_floor"
            )
    return KldJob(
        request=request,
        request_id=f"kld-{raw_request.state.request_id}",
        model_name=model.name,
        options=await state.models.engine_options(raw_request, model),
        reference=reference,
        first=first,
        last=last,
    )


async def _events(job: KldJob, state: ScoremodeState, queue: RequestQueue) -> AsyncGenerator[dict[str, Any], None]:
    """Each window; then the result."""
    settings = ScoreSettings(request_id=engine_id(job.request_id), queue=queue, options=job.options)
    compared = references_of(state).comparer.compare(job.reference, job.indices, job.request.top_logprobs, settings)
    positions: dict[int, KldPositions] = {}
    async with aclosing(compared) as windows:
        async for window in windows:
            positions[window.index] = window.positions
            yield await asyncio.to_thread(_window, job.request, window)
    yield await _result(job, [positions[index] for index in range(job.first, job.last)], state)


async def _result(job: KldJob, positions: list[KldPositions], state: ScoremodeState) -> dict[str, Any]:
    """All but `data`. A noise floor is stored in the reference."""
    lengths = list(map(len, positions))
    figures = await asyncio.to_thread(lambda: statistics(KldPositions.concatenate(positions), lengths, job.first))
    kld, num_scored = figures["kld"], figures["num_scored"]
    if job.request.as_noise_floor:
        if kld["mean"] is None or kld["p99"] is None or kld["max"] is None:
            raise RequestError("the noise floor is infinite", "as_noise_floor")
        floor = NoiseFloor(
            mean=kld["mean"], p99=kld["p99"], max=kld["max"], num_scored=num_scored, created=int(time.time())
        )
        await references_of(state).stored.save(job.reference, {"noise_floor": floor})
    num_tokens = int(job.reference.text.num_tokens[job.first : job.last].sum())
    return {
        "id": job.request_id,
        "object": "kld",
        "created": int(time.time()),
        "model": job.model_name,
        "reference": job.reference.name,
        "fingerprint": await with_adapter(references_of(state).stored.model.fingerprint, job.options["lora_request"]),
        "windows": [job.first, job.last],
        "num_scored": num_scored,
        "statistics": figures,
        "usage": {"prompt_tokens": num_tokens, "cached_tokens": 0, "total_tokens": num_tokens},
    }


def _window(request: KldRequest, window: WindowComparison) -> dict[str, Any]:
    encoded = request.encoding_format == "base64"
    content: dict[str, Any] = {"object": "kld.window", "index": window.index, "num_scored": len(window.positions)}
    for name, dtype in POSITION_DTYPES.items():
        values = getattr(window.positions, name)
        if encoded:
            content[name] = as_base64(values.astype(dtype))
        elif name.endswith("logprobs"):
            content[name] = json_logprobs(values)
        else:
            # As float64, because the shortest digits of a float32 read back as another float64.
            content[name] = values.astype(np.float64 if dtype == "<f4" else np.int32)
    if request.top_logprobs:
        write = top_arrays if encoded else top_entries
        content["top_logprobs"] = write(*window.top)
        content["reference_top_logprobs"] = write(*window.reference_top)
    return content
