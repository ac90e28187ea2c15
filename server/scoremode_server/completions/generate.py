"""Scoring requests to vLLM's generate route, token ids in and out, which prime-rl and others send.

vLLM's own handler answers with an engine client of ours, which leaves out the prompt's logprobs. They are written as
JSON from the engine's arrays.
"""

from collections.abc import AsyncIterator
from copy import copy
from dataclasses import replace
from typing import Any

from fastapi import Request
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput

from scoremode_server.completions.logprobs_json import LogprobsWriter, Style, prompt_logprobs
from scoremode_server.completions.response_parts import GAP, Body, as_body, filled, without_rows
from scoremode_server.errors import RequestError, UnfinishedError
from scoremode_server.prefix_cache.admission import Accept
from scoremode_server.prefix_cache.engine import EngineResult, ScoringEngine
from scoremode_server.prefix_cache.run import RowsRequest, engine_id, is_moved
from scoremode_server.scoring.turns import Turns
from scoremode_server.vllm_patches.queue_bounds import exempt_from_queue_bounds


class ScoringGenerate:
    """Answers requests for which `is_scoring_generation` is true."""

    def __init__(self, stock: ServingTokens, engine: ScoringEngine, writer: LogprobsWriter) -> None:
        self._stock = stock
        self._engine = engine
        self._writer = writer
        self._turns = Turns(at_once=1)

    @property
    def has_texts(self) -> bool:
        """Whether answers have the texts of tokens, which `--tokens-only` leaves out."""
        return bool(self._stock.has_tokenizer)

    async def generate(
        self, request: GenerateRequest, raw_request: Request, owner: str, accept: Accept
    ) -> Body | ErrorResponse:
        """The response as JSON, or the error that vLLM's handler returns. Rows are shared within an owner."""
        scoring = _EngineThatScores(self._stock, self._engine, owner, accept)
        stock = copy(self._stock)
        stock.engine_client = scoring
        with exempt_from_queue_bounds():
            response = await stock.serve_tokens(request, raw_request)
        if isinstance(response, ErrorResponse):
            return response
        assert scoring.result is not None
        content = response.model_dump()
        content["prompt_logprobs"] = GAP
        of_prompt = self._writer.prompt(scoring.result, Style(None, as_token_ids=False))
        parts = filled(content, [prompt_logprobs(of_prompt)])
        return as_body(parts, scoring.result.rows.token_ids.size, self._turns)


class _EngineThatScores:
    """The engine client of one request to vLLM's handler, with a `generate` of its own.

    Attributes:
        result: the rows, once the request is finished.
    """

    def __init__(self, stock: ServingTokens, engine: ScoringEngine, owner: str, accept: Accept) -> None:
        self._stock = stock
        self._engine = engine
        self._owner = owner
        self._accept = accept
        self.result: EngineResult | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock.engine_client, name)

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[RequestOutput]:
        """The request's only output, without logprobs of the prompt."""
        # Engines that a request is moved between know it by its id.
        name = request_id if is_moved(params) else engine_id(request_id)
        asked = RowsRequest.sample(prompt["prompt_token_ids"], name, prompt, params, self._owner, options)
        try:
            async with self._accept(request_id, 1, len(asked.token_ids)) as queue:
                self.result = await self._engine.rows(replace(asked, queue=queue))
        except UnfinishedError as error:
            self._stock._raise_if_error(error.finish_reason, request_id)
            raise
        except RequestError as error:
            # Other routes name the field `prompt`.
            error.param = error.param and "token_ids"
            raise
        yield without_rows(self.result)
