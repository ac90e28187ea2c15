"""vLLM's routes that may score: `POST /v1/completions`, `POST /v1/chat/completions`, and `POST /inference/v1/generate`
for token ids. Answers to scoring requests are written from arrays. vLLM answers all other requests."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion import api_router as stock_chat
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as stock_completions
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out import api_router as stock_tokens
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from scoremode_server.completions.handler import ScoringCompletions, ScoringHandler
from scoremode_server.completions.logprobs_json import LogprobsWriter
from scoremode_server.completions.requests import (
    CompletionBody,
    GenerateBody,
    is_scoring_chat,
    is_scoring_completion,
    is_scoring_generation,
)
from scoremode_server.http.json_fields import read_fields
from scoremode_server.http.requests import EVENT_RESPONSES, ScoremodeRoute, until_disconnect
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.vllm_compat.served_models import shorten_name

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

HANDLERS = {
    COMPLETIONS: (ScoringCompletions, "openai_serving_completion", "create_completion", "prompt"),
    CHAT: (ScoringHandler, "openai_serving_chat", "create_chat_completion", "messages"),
    GENERATE: (ScoringHandler, "serving_tokens", "serve_tokens", "token_ids"),
}
"""For each route: our handler's class, the name of vLLM's handler in the app's state, its method that answers, and the
request's field that has the prompts."""

STOCK_RESPONSES: dict[int | str, dict[str, Any]] = {
    **EVENT_RESPONSES,
    **{status: {"model": ErrorResponse} for status in (400, 404, 500)},
}


class CompletionRoute(ScoremodeRoute):
    # Chat completions are read as on vLLM's own route.
    read_as: ClassVar[Mapping[Any, type[BaseModel] | None]] = {
        CompletionRequest: CompletionBody,
        GenerateRequest: GenerateBody,
        ChatCompletionRequest: None,
    }


router = APIRouter(route_class=CompletionRoute)
generate_router = APIRouter(route_class=CompletionRoute)


def routers(app: FastAPI) -> Sequence[APIRouter]:
    """The routers to include in the app. The second is included only if vLLM serves its route (`--enable-scale-out`,
    `--tokens-only`)."""
    stock = [route.endpoint for route in app.routes if isinstance(route, APIRoute)]
    return [router, generate_router] if stock_tokens.generate in stock else [router]


def start(core: Core, state: State) -> None:
    """Put handlers into `app.state.scoremode_completions`, by route, for the routes that vLLM serves."""
    writer = LogprobsWriter(core.tokenizer.strings, core.scorer.engine.block_size)
    state.scoremode_completions = {}
    for route, (make_handler, name, method, param) in HANDLERS.items():
        if (stock := getattr(state, name, None)) is not None:
            state.scoremode_completions[route] = make_handler(core, stock, route, method, param, writer)


@router.post(COMPLETIONS, responses=STOCK_RESPONSES)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions, as vLLM serves them."""
    if is_scoring_completion(request):
        handler = raw_request.app.state.scoremode_completions[COMPLETIONS]
        return await _answer(request=request, raw_request=raw_request, handler=handler)
    return cast(Response, await stock_completions.create_completion(request, raw_request))


@router.post(CHAT, dependencies=[Depends(validate_json_request)], responses=STOCK_RESPONSES)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """OpenAI's chat completions, as vLLM serves them."""
    handler = raw_request.app.state.scoremode_completions.get(CHAT)
    if handler is not None and is_scoring_chat(request):
        # Refuse fields that appear twice, of which vLLM's model would take the last.
        read_fields(await raw_request.body())
        return await _answer(request=request, raw_request=raw_request, handler=handler)
    return cast(Response, await stock_chat.create_chat_completion(request, raw_request))


@generate_router.post(GENERATE, responses=STOCK_RESPONSES)
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Token ids in, token ids out, as vLLM serves them."""
    handler = raw_request.app.state.scoremode_completions.get(GENERATE)
    # Answers have texts of tokens, which a server with `--tokens-only` cannot give.
    if handler is not None and handler.stock.has_tokenizer and is_scoring_generation(request):
        return await _answer(request=request, raw_request=raw_request, handler=handler)
    return cast(Response, await stock_tokens.generate(request, raw_request))


@until_disconnect
async def _answer(request: Any, raw_request: Request, handler: ScoringHandler) -> Response:
    handler.core.admission.check()
    if isinstance(request, CompletionRequest) and request.prompt:
        handler.core.limits.check_num_sequences(len(as_prompts(request.prompt)), "prompt")
    result = await handler.answer(request, raw_request)
    if isinstance(result, ErrorResponse):
        shorten_name(result, request.model)
        return JSONResponse(result.model_dump(), status_code=result.error.code)
    format_wanted = raw_request.headers.get(stock_completions.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
    written: Any = Response if isinstance(result, bytes) else StreamingResponse
    return cast(Response, written(result, headers=metrics_header(format_wanted), media_type="application/json"))
