"""Answers scoring requests to vLLM's routes: OpenAI completions, such as `echo` with `logprobs` (lm-eval) and
`prompt_logprobs` (trainers), chat completions (inspect_ai), and vLLM's generate route, token ids in and out (prime-rl).

vLLM's own handlers validate, tokenize, make the sampling parameters and build the response. For logprobs they would
make an object per token, so the response has gaps instead, which are then filled with JSON written from arrays. A large
response is written while it is sent.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, tee
from typing import Any

import orjson
from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt

from scoremode_server.completions import logprobs_json
from scoremode_server.completions.logprobs_json import LogprobsWriter, OpenAI, Style
from scoremode_server.completions.requests import row_temperature
from scoremode_server.engine.admission import cancel_and_wait
from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence, engine_id
from scoremode_server.errors import EngineOutputError, RequestError, UnfinishedError
from scoremode_server.http.requests import accept
from scoremode_server.rows import own_rows
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.scorer import WRITTEN_AT_ONCE, Pacer
from scoremode_server.scoring.tokenizer import PromptTexts, as_prompts
from scoremode_server.vllm_compat.engine_client import exempt_from_queue_bounds
from scoremode_server.worker.row_spec import RowSpec

DECODED_AT_ONCE = 8192
"""Limit on a request's tokens that are decoded on the event loop, in some two milliseconds. vLLM decodes in a thread,
which takes longer for short prompts."""

HELD_SECONDS = 0.005
"""Writing a response lets other tasks run each time it has taken this long."""

_GAP = b"\0"
"""A byte that JSON never contains, because its strings escape it."""

GAP = orjson.Fragment(_GAP)


class ScoringHandler:
    """Answers requests to a route by calling `method` of `stock`, vLLM's own handler, with an engine client that
    scores. `param` names the request's field that has the prompts."""

    def __init__(self, core: Core, stock: Any, route: str, method: str, param: str, writer: LogprobsWriter) -> None:
        self.core, self.stock, self.route, self.param = core, stock, route, param
        self._long_pacer = Pacer(at_once=1)
        self.processes = stock.model_config.logprobs_mode == "processed_logprobs"
        """Whether a request's own temperature applies to its rows; the model's default temperature never does."""
        self._method = method
        self._writer = writer

    async def answer(self, request: Any, raw_request: Request) -> bytes | AsyncIterator[bytes] | ErrorResponse:
        """Answer a request. Returns JSON, or the error that vLLM's handler returns. A large response is returned in
        parts, each of which is written when the reader asks for it."""
        scoring = _EngineThatScores(self, request, raw_request)
        stock = copy(self.stock)
        stock.engine_client = scoring
        if self.processes:
            stock.default_sampling_params = {}
        try:
            with exempt_from_queue_bounds():
                response = await self.respond(stock, request, raw_request)
        finally:
            # vLLM's handler does not wait for the prompts that it cancels.
            await cancel_and_wait(*scoring.tasks)
        if isinstance(response, ErrorResponse):
            return response
        content = response.model_dump()
        parts = filled(content, self.gaps(content, request, scoring.passes))
        num_logprobs = sum(result.rows.token_ids.size for result in scoring.passes)
        return b"".join(parts) if num_logprobs <= WRITTEN_AT_ONCE else paced(parts, self._long_pacer)

    async def respond(self, stock: Any, request: Any, raw_request: Request) -> Any:
        return await getattr(stock, self._method)(request, raw_request)

    def prompt_text(self, request: Any, result: EnginePass) -> str | None:
        """The text of a prompt that vLLM has not decoded; None if the response does not need it."""
        return None

    def gaps(self, content: dict[str, Any], request: Any, results: list[EnginePass]) -> Iterator[Iterable[bytes]]:
        """Put a `GAP` into a response wherever logprobs belong. Returns the JSON that fills each gap, in order."""
        content["prompt_logprobs"] = GAP
        pieces = self._writer.prompt(results[0], Style(None, as_token_ids=False))
        return iter([logprobs_json.prompt_logprobs(pieces)])


class ScoringCompletions(ScoringHandler):
    """Answers requests for which `is_scoring_completion` is true."""

    def __init__(self, core: Core, stock: Any, *how: Any) -> None:
        super().__init__(core, stock, *how)
        self._texts = PromptTexts(stock.renderer.get_tokenizer, core.scorer.engine.block_size)

    async def respond(self, stock: Any, request: CompletionRequest, raw_request: Request) -> Any:
        """Have vLLM build the response without OpenAI's `logprobs`, for which it would make objects."""
        stock.render_completion_request = self._render
        num_top = request.logprobs if request.prompt_logprobs is None else request.prompt_logprobs
        without = request.model_copy(update={"logprobs": None, "prompt_logprobs": num_top})
        return await super().respond(stock, without, raw_request)

    def prompt_text(self, request: CompletionRequest, result: EnginePass) -> str | None:
        if not request.echo or request.return_token_ids or self.stock.renderer.tokenizer is None:
            return None
        return self._texts.text(result.output.prompt_token_ids, result.block_hashes[: result.num_cached_blocks])

    def gaps(
        self, content: dict[str, Any], request: CompletionRequest, results: list[EnginePass]
    ) -> Iterator[Iterable[bytes]]:
        for choice in content["choices"]:
            choice["prompt_logprobs"] = GAP
            if request.logprobs is not None:
                choice["logprobs"] = GAP
        as_token_ids = request.return_tokens_as_token_ids
        if as_token_ids is None:
            as_token_ids = self.stock.return_tokens_as_token_ids
        style = Style(request.logprobs, bool(as_token_ids))
        # Check the sampled tokens of all prompts before the response begins.
        sampled = [
            [] if request.max_tokens == 0 or request.logprobs is None else [self._write_sampled(result, style)]
            for result in results
        ]
        return self._fillings(results, sampled, style, echoes=bool(request.echo))

    async def _render(self, request: CompletionRequest) -> Any:
        """Check and render a request as vLLM does. Prompts given as at most `DECODED_AT_ONCE` token ids are decoded
        later, after they are scored."""
        stock = self.stock
        prompts = _token_prompts(request)
        async with self.core.admission.until_stopped():
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

    def _fillings(
        self, results: list[EnginePass], sampled: list[list[OpenAI]], style: Style, *, echoes: bool
    ) -> Iterator[Iterable[bytes]]:
        """Yield the JSON of each prompt: of OpenAI's `logprobs` if the request wants them, and then of vLLM's
        `prompt_logprobs`."""
        in_openai = echoes and style.num_top is not None
        for result, sampled_logprobs in zip(results, sampled, strict=True):
            pieces = self._writer.prompt(result, style if in_openai else Style(None, as_token_ids=False))
            *for_openai, for_vllm = tee(pieces, 1 + in_openai)
            if style.num_top is not None:
                yield logprobs_json.openai_logprobs(chain(*for_openai), sampled_logprobs)
            yield logprobs_json.prompt_logprobs(for_vllm)

    def _write_sampled(self, result: EnginePass, style: Style) -> OpenAI:
        assert style.num_top is not None
        rows = own_rows(result.output.outputs[0].logprobs, style.num_top + 1)
        if len(rows) != 1 or rows.has_nan.any():
            raise EngineOutputError("the engine computed no logprob, or NaN, for the token that it sampled")
        return self._writer.sampled(rows, style)


class _EngineThatScores:
    """The engine client that vLLM's handler gets for one request. The handler calls `generate` for each prompt before
    it reads an output, so all prompts are scored as one request."""

    def __init__(self, handler: ScoringHandler, request: Any, raw_request: Request) -> None:
        self.passes: list[EnginePass] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._handler, self._request, self._raw_request = handler, request, raw_request
        self._owner = handler.core.owner(raw_request.headers)
        self._settings: Callable[..., ScoreSettings] = ScoreSettings
        """Makes the settings that all passes share, given their `queue`."""
        self._finished = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler.stock.engine_client, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[RequestOutput]:
        token_ids = prompt["prompt_token_ids"]
        spec = RowSpec(
            num_top=params.prompt_logprobs,
            temperature=row_temperature(params) if self._handler.processes else 1.0,
        )
        if isinstance(self._request, CompletionRequest):
            params.logprobs, params.flat_logprobs = self._request.logprobs, True
            if self._request.max_tokens == 0 and len(token_ids) == self._handler.stock.model_config.max_model_len:
                # vLLM accepts only prompts that leave space for another token.
                spec = replace(spec, last_token=token_ids[-1])
                prompt = {**prompt, "prompt_token_ids": token_ids[:-1]}
        # Engines that send each other keys and values find them by the request's id, so it must not change.
        is_moved = "kv_transfer_params" in (params.extra_args or {})
        request_id = request_id if is_moved else engine_id(request_id)
        engine_pass = EnginePass(TokenSequence(context=token_ids))
        self.passes.append(engine_pass.prepare(request_id, token_ids, spec, prompt, params))
        self._settings = partial(
            ScoreSettings,
            request_id=request_id,
            use_cache=params.n == 1 and prompt["type"] == "token" and not is_moved,
            options=options,
            owner="" if is_moved else self._owner,
        )
        return self._output(len(self.passes) - 1, prompt)

    async def _output(self, index: int, prompt: Any) -> AsyncIterator[RequestOutput]:
        """Yield the only output of a prompt, which has no prompt logprobs."""
        if len(self.passes) == 1:
            await self._score()
        elif index == 0:
            self.tasks.append(asyncio.create_task(self._score()))
            # If any prompt fails, only the first prompt's output raises the error.
            await self.tasks[0]
        if index == 0:
            await self._handler.core.scorer.pacer.wait()
            self._finished.set()
        await self._finished.wait()
        result = self.passes[index]
        # Set all tokens, because the engine may not have been fed the last one.
        result.output.prompt_token_ids = result.sequence.context
        output = copy(result.output)
        if output.prompt is None:
            output.prompt = prompt.get("prompt") or self._handler.prompt_text(self._request, result)
        output.num_cached_tokens = result.num_cached_tokens
        yield output

    async def _score(self) -> None:
        handler, core = self._handler, self._handler.core
        request_id = self._raw_request.state.request_metadata.request_id
        num_tokens = sum(engine_pass.sequence.num_tokens for engine_pass in self.passes)
        num_values = [engine_pass.sequence.num_tokens * engine_pass.spec.width for engine_pass in self.passes]
        try:
            core.limits.check_num_values(num_values)
            async with accept(core.admission, handler.route, request_id, len(num_values), num_tokens) as queue:
                await core.answers.reserve(self._raw_request, sum(num_values))
                settings = self._settings(queue=queue)
                for engine_pass in self.passes:
                    engine_pass.sequence.settings = settings
                async with aclosing(queue.in_order(map(core.scorer.engine.rows, self.passes))) as in_order:
                    async for _ in in_order:
                        pass
        except UnfinishedError as error:
            handler.stock._raise_if_error(error.finish_reason, request_id)
            raise
        except RequestError as error:
            # Limits name the field `prompt`; this route may have another.
            error.param = error.param and handler.param
            raise


def _token_prompts(request: CompletionRequest) -> list[list[int]]:
    """The prompts of a request, if they are token ids that may be decoded after they are scored; else none."""
    if request.suffix is not None or request.truncate_prompt_tokens is not None or request.return_token_ids:
        return []
    prompts: list[Any] = as_prompts(request.prompt or "")
    return prompts if isinstance(prompts[0], list) else []


def filled(content: dict[str, Any], fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of `content`, with each `GAP` replaced by the next filling, which comes in parts."""
    between = iter(orjson.dumps(content).split(_GAP))
    yield next(between)
    for filling in fillings:
        yield from filling
        yield next(between)


async def paced(parts: Iterable[bytes], pacer: Pacer) -> AsyncIterator[bytes]:
    """Join small parts, and let other tasks run between the joined ones."""
    waiting: list[bytes] = []
    await pacer.wait()
    began = time.monotonic()
    for part in parts:
        waiting.append(part)
        if time.monotonic() - began > HELD_SECONDS:
            if joined := b"".join(waiting):
                yield joined
            waiting.clear()
            await pacer.wait()
            began = time.monotonic()
    yield b"".join(waiting)
