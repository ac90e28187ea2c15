"""OpenAI completions that score: what vLLM's handler does, without an object for every token.

`echo` with `logprobs` is how lm-eval and others ask for scores. vLLM's own handler gives the parts: it validates,
tokenizes, picks the adapter, makes the sampling parameters and builds the response. The logprobs, which hold something
for every token, are written as JSON from the engine's arrays.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from fastapi import Request
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.tokenizers import TokenizerLike

from scoremode_server.completion_logprobs import LogprobsWriter, Style, Written, openai_logprobs, prompt_logprobs
from scoremode_server.engine.packed_logprobs import PACKED, PackedLogprobs
from scoremode_server.errors import EngineOutputError
from scoremode_server.prompt_texts import PromptTexts
from scoremode_server.scoring import final_output, gather
from scoremode_server.token_strings import TokenStrings
from scoremode_server.turns import Turns

DECODED_AT_ONCE = 8192
"""Tokens of a request that are decoded, to echo their text, on the event loop: some two milliseconds. vLLM decodes all
in a thread, which for short prompts takes longer than decoding."""


class ScoringCompletions(OpenAIServingCompletion):
    """vLLM's completions handler for the requests that `is_scoring` picks out.

    It returns bytes of JSON, where vLLM's returns an object that has yet to be written.
    """

    def __init__(self, strings: TokenStrings, turns: Turns, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._turns = turns
        self._writer = LogprobsWriter(strings)
        self._texts = PromptTexts(self.renderer.get_tokenizer)

    @classmethod
    def like(
        cls, handler: OpenAIServingCompletion, engine: Any, strings: TokenStrings, turns: Turns
    ) -> "ScoringCompletions":
        """A handler with the settings of vLLM's own, on `engine`."""
        return cls(
            strings,
            turns,
            engine,
            handler.models,
            online_renderer=handler.online_renderer,
            request_logger=handler.request_logger,
            return_tokens_as_token_ids=handler.return_tokens_as_token_ids,
            enable_prompt_tokens_details=handler.enable_prompt_tokens_details,
            enable_force_include_usage=handler.enable_force_include_usage,
            enable_per_request_metrics=handler.enable_per_request_metrics,
        )

    async def _create_completion(self, request: CompletionRequest, raw_request: Request | None = None) -> Any:
        inputs = await self.render_completion_request(request)
        if isinstance(inputs, ErrorResponse):
            return inputs
        request_id = f"cmpl-{self._base_request_id(raw_request, request.request_id)}"
        created = int(time.time())
        metadata = RequestResponseMetadata(request_id=request_id)
        if raw_request is not None:
            raw_request.state.request_metadata = metadata
        adapter = self._maybe_get_adapters(request)
        options = {
            "lora_request": adapter,
            "trace_headers": None if raw_request is None else await self._get_trace_headers(raw_request.headers),
            "priority": self._get_priority(request, raw_request),
            "data_parallel_rank": self._get_data_parallel_rank(raw_request),
            "session_id": self._get_session_id(request, raw_request),
        }
        all_params = [self._params(request, prompt) for prompt in inputs]
        runs = []
        for index, (prompt, params) in enumerate(zip(inputs, all_params, strict=True)):
            item_id = f"{request_id}-{index}"
            self._log_inputs(item_id, prompt, params=params, lora_request=adapter)
            runs.append(final_output(self.engine_client.generate(prompt, params, item_id, **options)))
        outputs = await gather(runs)
        await self._turns.take()
        for output, prompt in zip(outputs, inputs, strict=True):
            if output.prompt is None and not request.return_token_ids:
                output.prompt = self._prompt_text(output, prompt)
        return self.request_output_to_completion_response(
            outputs, request, request_id, created, self.models.model_name(adapter), self.renderer.tokenizer, metadata
        )

    def _prompt_text(self, output: RequestOutput, prompt: Any) -> str | None:
        text: str | None = self._extract_prompt_text(prompt)
        packed = output.prompt_logprobs
        if text is not None or not isinstance(packed, PackedLogprobs) or output.prompt_token_ids is None:
            return text
        cached = packed.blocks[: packed.num_cached_blocks]
        return self._texts.text(output.prompt_token_ids, cached, packed.block_size)

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        """vLLM's check and rendering, but token ids, unless there are many, are decoded when their scores are there."""
        prompts = _token_prompts(request)
        if self.renderer.tokenizer is None or sum(map(len, prompts)) not in range(1, DECODED_AT_ONCE + 1):
            return await super().render_completion_request(request)
        error = await self._check_model(request)
        if error is not None:
            return error
        self._preflight(request.n or 1)
        return self.renderer.render_cmpl(
            [parse_model_prompt(self.model_config, prompt) for prompt in prompts],
            replace(request.build_tok_params(self.model_config), needs_detokenization=False),
            prompt_extras={} if request.cache_salt is None else {"cache_salt": request.cache_salt},
        )

    def _params(self, request: CompletionRequest, prompt: Any) -> SamplingParams:
        max_tokens = get_max_tokens(
            self.model_config.max_model_len,
            request.max_tokens,
            self._extract_prompt_len(prompt),
            self.default_sampling_params,
            self.override_max_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        params = request.to_sampling_params(max_tokens, self.default_sampling_params)
        params.flat_logprobs = True
        params.extra_args = {**(params.extra_args or {}), PACKED: 1}
        return params

    def request_output_to_completion_response(
        self,
        final_res_batch: list[RequestOutput],
        request: CompletionRequest,
        request_id: str,
        created_time: int,
        model_name: str,
        tokenizer: TokenizerLike | None,
        request_metadata: RequestResponseMetadata,
    ) -> Any:
        """The response as JSON. vLLM builds all of it but the logprobs, which it is not shown."""
        packed = [output.prompt_logprobs for output in final_res_batch]
        for output in final_res_batch:
            output.prompt_logprobs = None
        response: CompletionResponse = super().request_output_to_completion_response(
            final_res_batch,
            request.model_copy(update={"logprobs": None}),
            request_id,
            created_time,
            model_name,
            tokenizer,
            request_metadata,
        )
        content = response.model_dump()
        choices = iter(content["choices"])
        style = Style(num_top=request.logprobs, as_token_ids=self._as_token_ids(request))
        for output, logprobs in zip(final_res_batch, packed, strict=True):
            of_prompt = self._of_prompt(request, output, logprobs, style)
            full = orjson.Fragment(prompt_logprobs(of_prompt))
            for completion in output.outputs:
                of_sampled = [] if request.max_tokens == 0 else [self._of_sampled(completion, style)]
                choice = next(choices)
                choice["prompt_logprobs"] = full
                choice["logprobs"] = orjson.Fragment(openai_logprobs(of_prompt + of_sampled))
        return orjson.dumps(content)

    def _of_prompt(self, request: CompletionRequest, output: RequestOutput, packed: Any, style: Style) -> list[Written]:
        if not isinstance(packed, PackedLogprobs):
            raise EngineOutputError("the engine ended a request without logprobs")
        num_top = request.logprobs if request.prompt_logprobs is None else request.prompt_logprobs
        return self._writer.prompt(output.prompt_token_ids, packed, num_top + 1, style)

    def _of_sampled(self, completion: CompletionOutput, style: Style) -> Written:
        """The one token that was sampled."""
        flat = completion.logprobs
        if not isinstance(flat, FlatLogprobs) or len(flat) != 1:
            raise EngineOutputError("the engine ended a request without the logprobs of its last token")
        arrays = np.array([flat.token_ids]), np.array([flat.logprobs], np.float32), np.array(flat.ranks[:1])
        return self._writer.sampled(arrays, style)

    def _as_token_ids(self, request: CompletionRequest) -> bool:
        asked = request.return_tokens_as_token_ids
        return bool(self.return_tokens_as_token_ids if asked is None else asked)


def _token_prompts(request: CompletionRequest) -> list[list[int]]:
    """The prompts of a request that gives them as token ids and wants them echoed as text, whole; none of any other."""
    prompts: Any = request.prompt
    if request.suffix is not None or request.truncate_prompt_tokens is not None or request.return_token_ids:
        return []
    match prompts:
        case [int(), *_]:
            return [prompts]
        case [list(), *_]:
            return list(prompts)
        case _:
            return []
