"""Keeps prompt logprobs as the arrays that arrive from the engine, for requests made with `ScoringParams`.

vLLM turns them into Python objects token by token, on the API server's only event loop. At 100,000 tokens per second
that is most of its work. vLLM also decodes the whole prompt to find the text that a generated token adds. Here it
decodes only the prompt's end.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, cast

from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, uses_fast_detokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.rows import PromptLogprobs
from scoremode_server.worker.row_spec import ScoringParams

DECODED_TOKENS = 16
"""How many tokens at a prompt's end are decoded. The next token's text depends on at most four, because a character has
at most four bytes; vLLM's detokenizer for slow tokenizers looks at six."""

INCOMPLETE = "�"
"""The text that the bytes of an incomplete character decode to."""


def is_scoring(state: Any) -> bool:
    """Whether a request that vLLM's output processor holds was made with `ScoringParams`."""
    processor = state.logprobs_processor
    return processor is not None and isinstance(processor.prompt_logprobs, PromptLogprobs)


def decode_within_character(tokenizer: TokenizerLike, token_id: int, context: Sequence[int]) -> str:
    """Decode a token that ends within a character, together with the tokens before it, by vLLM's own rule."""
    processor = LogprobsProcessor(tokenizer, None, None, None, None, None)
    return cast(str, processor._correct_decoded_token(token_id, list(context)))


def patch() -> None:
    make, update = LogprobsProcessor.from_new_request.__func__, LogprobsProcessor._update_prompt_logprobs
    make_detokenizer = IncrementalDetokenizer.from_new_request.__func__

    def from_new_request(
        cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        if not isinstance(request.sampling_params, ScoringParams):
            return make(cls, tokenizer, request)
        # Chat completions get the texts of sampled tokens from vLLM. Requests for flat lists need no texts from it.
        processor = make(cls, None if request.sampling_params.flat_logprobs else tokenizer, request)
        processor.prompt_logprobs = PromptLogprobs()
        return processor

    def update_prompt_logprobs(self: Any, tensors: LogprobsTensors) -> None:
        if isinstance(self.prompt_logprobs, PromptLogprobs):
            self.prompt_logprobs = PromptLogprobs(tensors)
        else:
            update(self, tensors)

    def detokenizer_from_new_request(
        cls: type[IncrementalDetokenizer], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        if tokenizer is not None and isinstance(request.sampling_params, ScoringParams):
            request = _with_end_of_prompt(tokenizer, request)
        return make_detokenizer(cls, tokenizer, request)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
    LogprobsProcessor._update_prompt_logprobs = update_prompt_logprobs
    IncrementalDetokenizer.from_new_request = classmethod(detokenizer_from_new_request)


def _with_end_of_prompt(tokenizer: TokenizerLike, request: EngineCoreRequest) -> EngineCoreRequest:
    """Copy a request with only the end of its prompt, if the next token has the same text after this end as after the
    whole prompt. If the prompt ends within a character, return the request itself: vLLM's detokenizer then gives the
    whole prompt as the next token's text."""
    if request.prompt_token_ids is None or len(request.prompt_token_ids) <= DECODED_TOKENS:
        return request
    end = request.prompt_token_ids[-DECODED_TOKENS:]
    # Decode without transformers where vLLM's detokenizer does so; the text is the same.
    decode = tokenizer._tokenizer.decode if uses_fast_detokenizer(tokenizer) else tokenizer.decode
    text = decode(end, skip_special_tokens=request.sampling_params.skip_special_tokens)
    if not text or text.endswith(INCOMPLETE):
        return request
    shorter = copy(request)
    shorter.prompt_token_ids = end
    return shorter
