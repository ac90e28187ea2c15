"""`POST /v1/tokens`: the texts of single tokens, for clients that show a text token by token."""

import asyncio

from fastapi import APIRouter, Request, Response

from scoremode.wire.protocol import TokensRequest, TokensResponse
from scoremode_server.api.error_responses import ERROR_RESPONSES, ScoremodeRoute
from scoremode_server.api.requests import scoremode_state
from scoremode_server.api.responses import json_response

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"])


@router.post("/v1/tokens", response_model=TokensResponse, responses=ERROR_RESPONSES, summary="Texts of single tokens")
async def create_tokens(request: TokensRequest, raw_request: Request) -> Response:
    """The text of each token alone. An incomplete character becomes U+FFFD."""
    state = scoremode_state(raw_request)
    await state.models.resolve(request.model)
    state.limits.check_single_tokens(request.token_ids)
    tokens = await asyncio.to_thread(state.tokenizer.texts_of, request.token_ids)
    return json_response({"object": "tokens", "tokens": tokens})
