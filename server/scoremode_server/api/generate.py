"""`POST /inference/v1/generate`, vLLM's route of token ids: scoring requests written fast, everything else vLLM's."""

from functools import partial

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.scale_out.token_in_token_out import api_router as stock
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call

from scoremode_server.api.bodies import read_request
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import RouteHandler, with_error_responses
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.api.responses import written_response
from scoremode_server.api.statuses import CLIENT_CLOSED_REQUEST
from scoremode_server.completions.generate import is_scoring_generation, read_generate_request
from scoremode_server.vllm_patches.served_models import shorten_name

ROUTE = "/inference/v1/generate"


class GenerateRoute(APIRoute):
    """A route from which requests do not reach FastAPI. It would let vLLM's model look at the request again, which then
    forgets what the client has left out."""

    def get_route_handler(self) -> RouteHandler:
        async def read_and_handle(raw_request: Request) -> Response:
            request = await read_request(raw_request, read_generate_request)
            scoring = scoremode_state(raw_request).generate
            scores = scoring is not None and scoring.has_texts and is_scoring_generation(request)
            response: Response = await (_score if scores else generate)(request, raw_request)
            return response

        return with_error_responses(read_and_handle)


router = APIRouter(route_class=GenerateRoute)


def is_served(app: FastAPI) -> bool:
    """Whether vLLM was started with a flag that makes it serve the route: `--enable-scale-out`, `--tokens-only`."""
    return any(isinstance(route, APIRoute) and route.endpoint is stock.generate for route in app.routes)


@router.post(
    ROUTE,
    responses={
        200: {"content": {"text/event-stream": {}}},
        400: {"model": ErrorResponse},
        404: {"model": ErrorResponse},
        500: {"model": ErrorResponse},
    },
)
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Token ids in, token ids out, as vLLM serves them."""
    response: Response | None = await stock.generate(request, raw_request)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response


@load_aware_call
@until_disconnect
async def _score(request: GenerateRequest, raw_request: Request) -> Response:
    state = scoremode_state(raw_request)
    state.admission.check()
    assert state.generate is not None
    result = await state.generate.generate(
        request, raw_request, owner_of(raw_request), partial(accepted, state.admission, ROUTE)
    )
    if isinstance(result, ErrorResponse):
        shorten_name(result, request.model)
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    return written_response(result)
