"""`POST /v1/completions`: scoring requests are written from arrays, all others are vLLM's."""

from functools import partial

from fastapi import APIRouter, Request, Response
from vllm.entrypoints.openai.completion import api_router as stock
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import load_aware_call
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import STOCK_RESPONSES, ScoremodeRoute
from scoremode_server.api.requests import accepted, owner_of, scoremode_state
from scoremode_server.api.responses import written_response
from scoremode_server.completions.requests import is_scoring_completion
from scoremode_server.scoring.tokenizer import as_prompts

ROUTE = "/v1/completions"

router = APIRouter(route_class=ScoremodeRoute)


@router.post(ROUTE, responses=STOCK_RESPONSES)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions, as vLLM serves them."""
    answer = _create_scoring_completion if is_scoring_completion(request) else stock.create_completion
    response: Response = await answer(request, raw_request)
    return response


@load_aware_call
@until_disconnect
async def _create_scoring_completion(request: CompletionRequest, raw_request: Request) -> Response:
    state = scoremode_state(raw_request)
    state.admission.check()
    if request.prompt:
        state.limits.check_num_sequences(len(as_prompts(request.prompt)), "prompt")
    accept = partial(accepted, state.admission, ROUTE)
    result = await state.completions.create_completion(request, raw_request, owner_of(raw_request), accept)
    format_wanted = raw_request.headers.get(stock.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
    return written_response(result, request.model, metrics_header(format_wanted))
