"""Requests to vLLM's routes that score: OpenAI completions, such as `echo` with `logprobs` (lm-eval) and
`prompt_logprobs` (trainers), chat completions (inspect_ai), and vLLM's generate route, token ids in and out (prime-rl).

vLLM's own handlers validate, tokenize, make the sampling parameters and build the response. The logprobs, for which
they would make an object per token, fill gaps in it with JSON written from arrays, while it is sent if it is large.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import orjson
from fastapi import Request
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt

from scoremode_server.completions import logprobs_json
from scoremode_server.completions.logprobs_json import LogprobsWriter, OpenAI, Style
from scoremode_server.completions.prompt_texts import PromptTexts
from scoremode_server.errors import EngineOutputError, RequestError, UnfinishedError
from scoremode_server.prefix_cache.admission import Accept
from scoremode_server.prefix_cache.engine import EngineResult, ScoringEngine
from scoremode_server.prefix_cache.run import RowsRequest, engine_id, is_moved
from scoremode_server.rows import read_columns
from scoremode_server.scoring.scorer import WRITTEN_AT_ONCE, Turns
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.vllm_patches.engine_client import exempt_from_queue_bounds

DECODED_AT_ONCE = 8192
"""Tokens of a request whose text is decoded on the event loop, in some two milliseconds. vLLM decodes in a thread,
which takes longer for short prompts."""

HELD_SECONDS = 0.005
"""After this time, writing lets other tasks run."""

Body = bytes | AsyncIterator[bytes]
"""JSON, of a large response in parts, each written when the reader asks for it."""

_GAP = b"\0"
"""A byte that JSON never has: in texts it is escaped."""

GAP = orjson.Fragment(_GAP)


class ScoringCompletions:
    """Answers requests for which `is_scoring_completion` is true, with the parts of vLLM's completions handler."""

    def __init__(
        self, stock: OpenAIServingCompletion, engine: ScoringEngine, writer: LogprobsWriter, turns: Turns
    ) -> None:
        self._stock = stock
        self._engine = engine
        self._turns = turns
        self._long_turns = Turns(at_once=1)
        self._writer = writer
        self._texts = PromptTexts(stock.renderer.get_tokenizer, engine.block_size)

    async def answer(
        self, request: CompletionRequest, raw_request: Request, owner: str, accept: Accept
    ) -> Body | ErrorResponse:
        """The response as JSON, or the error that vLLM's handler returns. Rows are shared within an owner."""
        answering = self._answer(request, raw_request, owner, accept)
        result: Body | ErrorResponse = await self._stock._with_kv_transfer_rejection_cleanup(
            answering, request, raw_request
        )
        return result

    async def _answer(
        self, request: CompletionRequest, raw_request: Request, owner: str, accept: Accept
    ) -> Body | ErrorResponse:
        stock = self._stock
        with self._engine.admission.until_stopped(), exempt_from_queue_bounds():
            inputs = await self._render(request)
        if isinstance(inputs, ErrorResponse):
            return inputs
        metadata = RequestResponseMetadata(request_id=f"cmpl-{stock._base_request_id(raw_request, request.request_id)}")
        created = int(time.time())
        raw_request.state.request_metadata = metadata
        options = {
            "lora_request": stock._maybe_get_adapters(request),
            "trace_headers": await stock._get_trace_headers(raw_request.headers),
            "priority": stock._get_priority(request, raw_request),
            "data_parallel_rank": stock._get_data_parallel_rank(raw_request),
            "session_id": stock._get_session_id(request, raw_request),
        }
        # Engines that a request is moved between know it by its id.
        name = metadata.request_id if request.kv_transfer_params else engine_id(metadata.request_id)
        asked = [
            self._rows_request(request, prompt, f"{name}-{index}", owner, options)
            for index, prompt in enumerate(inputs)
        ]
        num_tokens = sum(len(each.token_ids) for each in asked)
        try:
            async with accept(metadata.request_id, len(asked), num_tokens) as queue:
                coroutines = (self._engine.rows(replace(each, queue=queue)) for each in asked)
                async with aclosing(queue.in_order(coroutines)) as in_order:
                    results = [result async for result in in_order]
        except UnfinishedError as error:
            stock._raise_if_error(error.finish_reason, metadata.request_id)
            raise
        await self._turns.wait()
        model_name = stock.models.model_name(options["lora_request"])
        return self._written(request, inputs, results, created, model_name, metadata)

    def _written(
        self,
        request: CompletionRequest,
        inputs: list[Any],
        results: list[EngineResult],
        created: int,
        model_name: str,
        metadata: RequestResponseMetadata,
    ) -> Body:
        """The response that vLLM builds without logprobs, which then fill gaps in it."""
        stock, needs_text = self._stock, request.echo and not request.return_token_ids
        response = stock.request_output_to_completion_response(
            [
                _without_rows(result, self._prompt_text(prompt, result) if needs_text else None)
                for prompt, result in zip(inputs, results, strict=True)
            ],
            request.model_copy(update={"logprobs": None}),
            metadata.request_id,
            created,
            model_name,
            stock.renderer.tokenizer,
            metadata,
        )
        content = response.model_dump()
        for choice in content["choices"]:
            choice["prompt_logprobs"] = GAP
            if request.logprobs is not None:
                choice["logprobs"] = GAP
        as_token_ids = request.return_tokens_as_token_ids
        if as_token_ids is None:
            as_token_ids = stock.return_tokens_as_token_ids
        style = Style(request.logprobs, bool(as_token_ids))
        # All are checked before the response begins.
        sampled = [
            [] if request.max_tokens == 0 or request.logprobs is None else [self._of_sampled(completion, style)]
            for result in results
            for completion in result.output.outputs
        ]
        parts = filled(content, self._in_gaps(results, iter(sampled), style, echoes=bool(request.echo)))
        num_entries = sum(result.rows.token_ids.size * len(result.output.outputs) for result in results)
        return _as_body(parts, num_entries, self._long_turns)

    async def _render(self, request: CompletionRequest) -> Any:
        """vLLM's check and rendering. Token ids, unless there are many, are decoded after they are scored."""
        stock = self._stock
        prompts = _token_prompts(request)
        if stock.renderer.tokenizer is None or sum(map(len, prompts)) not in range(1, DECODED_AT_ONCE + 1):
            return await stock.render_completion_request(request)
        error = await stock._check_model(request)
        if error is not None:
            return error
        stock._preflight(request.n or 1)
        return stock.renderer.render_cmpl(
            [parse_model_prompt(stock.model_config, prompt) for prompt in prompts],
            replace(request.build_tok_params(stock.model_config), needs_detokenization=False),
            prompt_extras={} if request.cache_salt is None else {"cache_salt": request.cache_salt},
        )

    def _rows_request(
        self, request: CompletionRequest, prompt: Any, request_id: str, owner: str, options: dict[str, Any]
    ) -> RowsRequest:
        stock = self._stock
        max_tokens = get_max_tokens(
            stock.model_config.max_model_len,
            request.max_tokens,
            stock._extract_prompt_len(prompt),
            stock.default_sampling_params,
            stock.override_max_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        params = request.to_sampling_params(max_tokens, stock.default_sampling_params)
        params.flat_logprobs = True
        stock._log_inputs(request_id, prompt, params=params, lora_request=options["lora_request"])
        token_ids = stock._extract_prompt_components(prompt).token_ids
        return RowsRequest.sample(token_ids, request_id, prompt, params, owner, options)

    def _prompt_text(self, prompt: Any, result: EngineResult) -> str | None:
        text: str | None = result.output.prompt or self._stock._extract_prompt_text(prompt)
        if text is not None or self._stock.renderer.tokenizer is None:
            return text
        return self._texts.text(result.output.prompt_token_ids, result.block_hashes[: result.num_cached_blocks])

    def _in_gaps(
        self, results: list[EngineResult], sampled: Iterator[list[OpenAI]], style: Style, *, echoes: bool
    ) -> Iterator[Iterable[bytes]]:
        """What fills the gaps of a response: for each choice OpenAI's logprobs, if wanted, and vLLM's."""
        in_openai = echoes and style.num_top is not None
        for result in results:
            of_prompt = self._writer.prompt(result, style if in_openai else Style(None, as_token_ids=False))
            # Written once for all choices.
            copies = iter(tee(of_prompt, (1 + in_openai) * len(result.output.outputs)))
            for _ in result.output.outputs:
                of_sampled = next(sampled)
                if style.num_top is not None:
                    yield logprobs_json.openai_logprobs(next(copies) if in_openai else (), of_sampled)
                yield logprobs_json.prompt_logprobs(next(copies))

    def _of_sampled(self, completion: CompletionOutput, style: Style) -> OpenAI:
        assert style.num_top is not None
        columns = read_columns(completion.logprobs, style.num_top + 1)
        if len(columns[0]) != 1 or np.isnan(columns[1]).any():
            raise EngineOutputError("the engine computed no logprob, or NaN, for the token that it sampled")
        return self._writer.sampled(columns, style)


@dataclass(frozen=True, slots=True)
class ScoringHandler:
    """Answers requests of one sequence, to vLLM's generate route and to chat completions, by vLLM's own handler with an
    engine client that scores."""

    stock: Any
    """vLLM's handler."""
    method: str
    """Of the handler, which answers."""
    param: str
    """The field that a request has its sequence in."""
    engine: ScoringEngine
    writer: LogprobsWriter
    turns: Turns = field(default_factory=partial(Turns, at_once=1))

    async def answer(self, request: Any, raw_request: Request, owner: str, accept: Accept) -> Body | ErrorResponse:
        """The response as JSON, or the error that vLLM's handler returns. Rows are shared within an owner."""
        scoring = _EngineThatScores(self, owner, accept)
        stock = copy(self.stock)
        stock.engine_client = scoring
        with exempt_from_queue_bounds():
            response = await getattr(stock, self.method)(request, raw_request)
        if isinstance(response, ErrorResponse):
            return response
        assert scoring.result is not None
        content = response.model_dump()
        content["prompt_logprobs"] = GAP
        of_prompt = self.writer.prompt(scoring.result, Style(None, as_token_ids=False))
        parts = filled(content, [logprobs_json.prompt_logprobs(of_prompt)])
        return _as_body(parts, scoring.result.rows.token_ids.size, self.turns)


@dataclass(slots=True)
class _EngineThatScores:
    """The engine client of one request to vLLM's handler, with a `generate` of its own."""

    handler: ScoringHandler
    owner: str
    accept: Accept
    result: EngineResult | None = None
    """Once the request is finished."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler.stock.engine_client, name)

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[RequestOutput]:
        """The request's only output, without logprobs of the prompt."""
        # Engines that a request is moved between know it by its id.
        name = request_id if is_moved(params) else engine_id(request_id)
        asked = RowsRequest.sample(prompt["prompt_token_ids"], name, prompt, params, self.owner, options)
        try:
            async with self.accept(request_id, 1, len(asked.token_ids)) as queue:
                self.result = await self.handler.engine.rows(replace(asked, queue=queue))
        except UnfinishedError as error:
            self.handler.stock._raise_if_error(error.finish_reason, request_id)
            raise
        except RequestError as error:
            # Other routes name the field `prompt`.
            error.param = error.param and self.handler.param
            raise
        yield _without_rows(self.result, prompt.get("prompt"))


def _token_prompts(request: CompletionRequest) -> list[list[int]]:
    """The prompts of a request that has them as token ids and may want them echoed as text; else none."""
    if request.suffix is not None or request.truncate_prompt_tokens is not None or request.return_token_ids:
        return []
    prompts: list[Any] = as_prompts(request.prompt or "")
    return prompts if isinstance(prompts[0], list) else []


def _without_rows(result: EngineResult, prompt: str | None = None) -> RequestOutput:
    """The output that vLLM's response builder gets: with the prompt's text, without its logprobs."""
    output = copy(result.output)
    output.prompt = prompt if output.prompt is None else output.prompt
    output.prompt_logprobs = None
    output.num_cached_tokens = result.num_cached_tokens
    return output


def filled(content: dict[str, Any], fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of `content` with one of the fillings, each in parts, for each `GAP` in it."""
    between = iter(orjson.dumps(content).split(_GAP))
    yield next(between)
    for filling in fillings:
        yield from filling
        yield next(between)


def _as_body(parts: Iterable[bytes], num_logprobs: int, turns: Turns) -> Body:
    """A response with `num_logprobs` logprobs from its parts."""
    return b"".join(parts) if num_logprobs <= WRITTEN_AT_ONCE else in_turns(parts, turns)


async def in_turns(parts: Iterable[bytes], turns: Turns) -> AsyncIterator[bytes]:
    """Parts, several small ones as one. Other tasks run between them."""
    waiting: list[bytes] = []
    await turns.wait()
    began = time.monotonic()
    for part in parts:
        waiting.append(part)
        if time.monotonic() - began > HELD_SECONDS:
            if joined := b"".join(waiting):
                yield joined
            waiting.clear()
            await turns.wait()
            began = time.monotonic()
    yield b"".join(waiting)
