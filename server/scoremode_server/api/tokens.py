"""`POST /v1/tokens`: the texts of single tokens, for clients that show a text token by token."""

import asyncio

from fastapi import APIRouter, Request, Response

from scoremode.protocol import TokensRequest, TokensResponse
from scoremode_server.api.error_responses import ERROR_RESPONSES, ScoremodeRoute
from scoremode_server.api.requests import scoremode_state
from scoremode_server.api.responses import json_response
from scoremode_server.scoring.tokenizer import Tokenizer

LOOKED_UP_AT_ONCE = 4_096
"""Tokens that are looked up on the event loop, in a few milliseconds. More are looked up in a thread."""

router = APIRouter(route_class=ScoremodeRoute, tags=["scoring"])


@router.post("/v1/tokens", response_model=TokensResponse, responses=ERROR_RESPONSES, summary="Texts of single tokens")
async def create_tokens(request: TokensRequest, raw_request: Request) -> Response:
    """The text of each token alone. An incomplete character becomes U+FFFD."""
    state = scoremode_state(raw_request)
    await state.models.resolve(request.model)
    state.limits.check_single_tokens(request.token_ids)
    if len(request.token_ids) > LOOKED_UP_AT_ONCE:
        return await asyncio.to_thread(_response, state.tokenizer, request.token_ids)
    return _response(state.tokenizer, request.token_ids)


def _response(tokenizer: Tokenizer, token_ids: list[int]) -> Response:
    return json_response({"object": "tokens", "tokens": tokenizer.texts_of(token_ids)})
