"""`POST /v1/completions`: scoring requests written fast, everything else vLLM's."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.openai.completion import api_router as stock
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from scoremode_server.api.disconnects import until_disconnect
from scoremode_server.api.error_responses import error_response
from scoremode_server.app import scoremode_state
from scoremode_server.completions.requests import ScoringRequestReader, is_scoring
from scoremode_server.errors import RequestError


class CompletionsRoute(APIRoute):
    """A route on which FastAPI does not read the bodies of scoring requests of token ids."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        reader = ScoringRequestReader()

        async def handle_scoring_first(raw_request: Request) -> Response:
            scoring = reader.read(await raw_request.body())
            if scoring is None:
                return await handle(raw_request)
            await validate_json_request(raw_request)
            response: Response = await _create_scoring_completion(scoring, raw_request)
            return response

        return handle_scoring_first


router = APIRouter(route_class=CompletionsRoute)


@router.post(
    "/v1/completions",
    dependencies=[Depends(validate_json_request)],
    responses={
        200: {"content": {"text/event-stream": {}}},
        400: {"model": ErrorResponse},
        404: {"model": ErrorResponse},
        500: {"model": ErrorResponse},
    },
)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions, as vLLM serves them."""
    handle = _create_scoring_completion if is_scoring(request) else stock.create_completion
    response: Response = await handle(request, raw_request)
    return response


@load_aware_call
@until_disconnect
async def _create_scoring_completion(request: CompletionRequest, raw_request: Request) -> Response:
    state = scoremode_state(raw_request)
    try:
        state.admission.check()
        result = await state.completions.create_completion(request, raw_request, state.owner(raw_request))
    except RequestError as error:
        return error_response(error)
    if isinstance(result, ErrorResponse):
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    format_wanted = raw_request.headers.get(stock.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
    return Response(result, headers=metrics_header(format_wanted), media_type="application/json")
