"""`POST /v1/completions`: scoring requests written fast, everything else vLLM's."""

from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.openai.completion import api_router as stock
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from scoremode_server.api.bodies import ReadRequest, read_request
from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import RouteHandler, with_error_responses
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.api.responses import written_response
from scoremode_server.completions.requests import is_scoring_completion, read_completion_request
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.vllm_patches.served_models import shorten_name

ROUTE = "/v1/completions"


class CompletionsRoute(APIRoute):
    """A route whose scoring requests do not pass through FastAPI, which has nothing left to do for them."""

    def get_route_handler(self) -> RouteHandler:
        handle = super().get_route_handler()

        async def read_and_handle(raw_request: Request) -> Response:
            request = await read_request(raw_request, read_completion_request)
            if not is_scoring_completion(request):
                return await handle(ReadRequest(raw_request, request))
            response: Response = await _create_scoring_completion(request, raw_request)
            return response

        return with_error_responses(read_and_handle)


router = APIRouter(route_class=CompletionsRoute)


@router.post(
    ROUTE,
    responses={
        200: {"content": {"text/event-stream": {}}},
        400: {"model": ErrorResponse},
        404: {"model": ErrorResponse},
        500: {"model": ErrorResponse},
    },
)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions, as vLLM serves them."""
    response: Response = await stock.create_completion(request, raw_request)
    return response


@load_aware_call
@until_disconnect
async def _create_scoring_completion(request: CompletionRequest, raw_request: Request) -> Response:
    state = scoremode_state(raw_request)
    state.admission.check()
    if request.prompt:
        state.limits.check_num_sequences(len(as_prompts(request.prompt)), None)
    result = await state.completions.create_completion(
        request, raw_request, owner_of(raw_request), partial(accepted, state.admission, ROUTE)
    )
    if isinstance(result, ErrorResponse):
        shorten_name(result, request.model)
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    format_wanted = raw_request.headers.get(stock.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
    return written_response(result, metrics_header(format_wanted))
