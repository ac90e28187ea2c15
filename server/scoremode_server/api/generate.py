"""`POST /inference/v1/generate`, vLLM's route of token ids: scoring requests are written from arrays, all others are
vLLM's."""

from functools import partial

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from vllm.entrypoints.scale_out.token_in_token_out import api_router as stock
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import STOCK_RESPONSES, ScoremodeRoute
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.api.responses import written_response
from scoremode_server.completions.generate import is_scoring_generation

ROUTE = "/inference/v1/generate"

router = APIRouter(route_class=ScoremodeRoute)


def is_served(app: FastAPI) -> bool:
    """Whether vLLM was started with a flag that makes it serve the route: `--enable-scale-out`, `--tokens-only`."""
    return any(isinstance(route, APIRoute) and route.endpoint is stock.generate for route in app.routes)


@router.post(ROUTE, responses=STOCK_RESPONSES)
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Token ids in, token ids out, as vLLM serves them."""
    scoring = scoremode_state(raw_request).generate
    scores = scoring is not None and scoring.has_texts and is_scoring_generation(request)
    response: Response = await (_score if scores else stock.generate)(request, raw_request)
    return response


@load_aware_call
@until_disconnect
async def _score(request: GenerateRequest, raw_request: Request) -> Response:
    state = scoremode_state(raw_request)
    state.admission.check()
    assert state.generate is not None
    accept = partial(accepted, state.admission, ROUTE)
    result = await state.generate.generate(request, raw_request, owner_of(raw_request), accept)
    return written_response(result, request.model)
