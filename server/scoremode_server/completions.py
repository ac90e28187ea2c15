"""OpenAI completions that score: vLLM's handler, with the logprobs written from arrays.

`echo` with `logprobs` is how lm-eval and others ask for scores. vLLM's own handler does everything here but the writing
of logprobs: it validates, tokenizes, picks the adapter, samples, and builds the response. Then the two parts of each
choice that hold something for every token are written as JSON from the engine's arrays.
"""

from typing import Any

import orjson
from fastapi import Request
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike

from scoremode_server.completion_logprobs import LogprobsWriter, PromptLogprobs, Style
from scoremode_server.engine.packed_logprobs import PACKED, PackedLogprobs
from scoremode_server.errors import EngineOutputError
from scoremode_server.token_strings import TokenStrings


def is_scoring(request: CompletionRequest) -> bool:
    """Whether a request wants logprobs of its prompt, all at once, from the top k: what is written from arrays.

    Streams, beam search, whole-vocabulary logprobs and chosen token ids stay vLLM's.
    """
    return bool(
        request.echo
        and request.logprobs is not None
        and request.logprobs >= 0
        and (request.prompt_logprobs is None or request.prompt_logprobs >= 0)
        and request.max_tokens in (0, 1)
        and request.prompt_embeds is None
        and not (request.stream or request.use_beam_search or request.logprob_token_ids)
    )


class ScoringCompletions(OpenAIServingCompletion):
    """vLLM's completions handler for the requests that `is_scoring` picks out.

    It returns bytes of JSON, where vLLM's returns an object that has yet to be written.
    """

    def __init__(self, strings: TokenStrings, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._writer = LogprobsWriter(strings)

    @classmethod
    def like(cls, handler: OpenAIServingCompletion, engine: Any, strings: TokenStrings) -> "ScoringCompletions":
        """A handler with the settings of vLLM's own, on `engine`."""
        return cls(
            strings,
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
        request.vllm_xargs = {**(request.vllm_xargs or {}), PACKED: 1}
        return await super()._create_completion(request, raw_request)

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
        for output, logprobs in zip(final_res_batch, packed, strict=True):
            of_prompt = self._of_prompt(request, output, logprobs)
            for completion in output.outputs:
                choice = next(choices)
                choice["prompt_logprobs"] = orjson.Fragment(of_prompt.full())
                choice["logprobs"] = orjson.Fragment(of_prompt.openai(self._of_sampled(request, completion)))
        return orjson.dumps(content)

    def _of_prompt(self, request: CompletionRequest, output: RequestOutput, packed: Any) -> PromptLogprobs:
        if not isinstance(packed, PackedLogprobs):
            raise EngineOutputError("the engine ended a request without logprobs")
        asked = request.logprobs if request.prompt_logprobs is None else request.prompt_logprobs
        style = Style(num_top=request.logprobs, as_token_ids=self._as_token_ids(request))
        return self._writer.prompt(
            output.prompt_token_ids, packed.arrays(asked + 1), style, output.num_cached_tokens or 0
        )

    def _of_sampled(self, request: CompletionRequest, completion: CompletionOutput) -> CompletionLogProbs | None:
        """vLLM's own logprobs of the one token that was sampled; None where only the prompt was asked for."""
        if request.max_tokens == 0:
            return None
        return self._create_completion_logprobs(
            token_ids=completion.token_ids,
            top_logprobs=completion.logprobs,
            num_output_top_logprobs=request.logprobs,
            tokenizer=self.renderer.tokenizer,
            return_as_token_id=request.return_tokens_as_token_ids,
        )

    def _as_token_ids(self, request: CompletionRequest) -> bool:
        asked = request.return_tokens_as_token_ids
        return bool(self.return_tokens_as_token_ids if asked is None else asked)
