"""vLLM's routes that may score: `POST /v1/completions`, `POST /v1/chat/completions`, and of token ids
`POST /inference/v1/generate`. Answers to scoring requests are written from arrays, all others are vLLM's."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.openai.chat_completion import api_router as stock_chat
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as stock_completions
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out import api_router as stock_tokens
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from scoremode_server.completions.handler import ScoringHandler
from scoremode_server.completions.requests import is_scoring_chat, is_scoring_completion, is_scoring_generation
from scoremode_server.engine.admission import RequestQueue
from scoremode_server.http.json_fields import read_fields
from scoremode_server.http.requests import ScoremodeRoute, accepted, scoremode_state, until_disconnect
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.vllm_compat.served_models import shorten_name

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

STOCK_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **{status: {"model": ErrorResponse} for status in (400, 404, 500)},
}

router = APIRouter(route_class=ScoremodeRoute)
generate_router = APIRouter(route_class=ScoremodeRoute)


def serves_generate(app: FastAPI) -> bool:
    """Whether vLLM was started with a flag that makes it serve the route: `--enable-scale-out`, `--tokens-only`."""
    return any(isinstance(route, APIRoute) and route.endpoint is stock_tokens.generate for route in app.routes)


@router.post(COMPLETIONS, responses=STOCK_RESPONSES)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions, as vLLM serves them."""
    if is_scoring_completion(request):
        return await _answer(request, raw_request, scoremode_state(raw_request).completions, COMPLETIONS)
    return cast(Response, await stock_completions.create_completion(request, raw_request))


@router.post(CHAT, dependencies=[Depends(validate_json_request)], responses=STOCK_RESPONSES)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """OpenAI's chat completions, as vLLM serves them."""
    handler = scoremode_state(raw_request).chat
    if handler is not None and is_scoring_chat(request):
        # Refuses names that are given twice, of which vLLM's model takes the last.
        read_fields(await raw_request.body())
        return await _answer(request, raw_request, handler, CHAT)
    return cast(Response, await stock_chat.create_chat_completion(request, raw_request))


@generate_router.post(GENERATE, responses=STOCK_RESPONSES)
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Token ids in, token ids out, as vLLM serves them."""
    handler = scoremode_state(raw_request).generate
    # Answers have the texts of tokens, which `--tokens-only` leaves out.
    if handler is not None and handler.stock.has_tokenizer and is_scoring_generation(request):
        return await _answer(request, raw_request, handler, GENERATE)
    return cast(Response, await stock_tokens.generate(request, raw_request))


@until_disconnect
async def _answer(request: Any, raw_request: Request, handler: ScoringHandler, route: str) -> Response:
    state = scoremode_state(raw_request)
    state.admission.check()
    if isinstance(request, CompletionRequest) and request.prompt:
        state.limits.check_num_sequences(len(as_prompts(request.prompt)), "prompt")

    def accept(
        request_id: str, num_values: Sequence[int], num_tokens: int
    ) -> AbstractAsyncContextManager[RequestQueue]:
        state.limits.check_num_values(num_values)
        return accepted(state.admission, route, request_id, len(num_values), num_tokens)

    result = await handler.answer(request, raw_request, state.owner(raw_request.headers), accept)
    if isinstance(result, ErrorResponse):
        shorten_name(result, request.model)
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    format_wanted = raw_request.headers.get(stock_completions.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
    written: Any = Response if isinstance(result, bytes) else StreamingResponse
    return cast(Response, written(result, headers=metrics_header(format_wanted), media_type="application/json"))
