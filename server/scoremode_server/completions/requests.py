"""Reads requests to vLLM's routes fast: benchmarks send thousands of them, with thousands of token ids each."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from scoremode_server.errors import RequestError
from scoremode_server.json_fields import PROMPTS, TOKENS, Fields, check_names, read_anything, read_list, split, stand_in


def is_scoring_completion(request: CompletionRequest) -> bool:
    """Whether a request wants the top k of its prompt, not streamed. vLLM answers all others."""
    num_logprobs = request.prompt_logprobs
    if num_logprobs is None and request.echo:
        num_logprobs = request.logprobs
    return bool(
        num_logprobs is not None
        and num_logprobs >= 0
        and (request.logprobs is None or request.logprobs >= 0)
        # Without `echo`, vLLM refuses to generate nothing.
        and request.max_tokens in ((0, 1) if request.echo else (1,))
        and request.prompt_embeds is None
        and not (request.stream or request.use_beam_search or request.logprob_token_ids)
    )


def is_scoring_generation(request: GenerateRequest) -> bool:
    """Whether a request wants the top k of its prompt and one sampled token, not streamed. vLLM answers all others."""
    params = request.sampling_params
    return bool(
        params.prompt_logprobs is not None
        and params.prompt_logprobs >= 0
        and request.is_sampling_param_provided("max_tokens")
        and params.max_tokens == 1
        and params.detokenize
        and request.output_mode == "tokens"
        and not (request.stream or request.features or request.content_parts)
        and not (params.logprob_token_ids or params.prompt_logprob_token_ids)
    )


def is_scoring_chat(request: ChatCompletionRequest) -> bool:
    """Whether a request wants the top k of its conversation of texts and one sampled token, not streamed. vLLM answers
    all others."""
    num_logprobs = request.prompt_logprobs
    if num_logprobs is None and request.echo:
        num_logprobs = request.top_logprobs
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return bool(
        num_logprobs is not None
        and num_logprobs >= 0
        and most == 1
        and not (request.stream or request.use_beam_search)
        and all(isinstance(message.get("content"), str | None) for message in request.messages)
    )


def read_completion_request(body: bytes) -> CompletionRequest:
    """The request that vLLM's model makes of a body. Pydantic tries each of a prompt's four forms on each token id, so
    the prompt is decoded here, and vLLM's model validates a short one in its place.

    Raises:
        ValidationError, VLLMValidationError: vLLM's model refuses another field.
    """
    fields, repeated = split(body)
    values = _decoded(fields, "prompt", PROMPTS)
    prompt: Any = values.get("prompt")
    if fields.pop("prompt", None) is not None:
        _check_prompt(prompt)
        # vLLM's model checks the number of prompts.
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        values["prompt"] = stand_in(prompt) * len(prompt) if several else stand_in(prompt)
    request = CompletionRequest.model_validate(values)
    request.prompt = prompt
    if is_scoring_completion(request):
        check_names(fields, repeated)
    return request


def read_generate_request(body: bytes) -> GenerateRequest:
    """The request that vLLM's model makes of a body.

    Raises:
        ValidationError, VLLMValidationError: vLLM's model refuses a field.
    """
    fields, repeated = split(body)
    request = GenerateRequest.model_validate(_decoded(fields, "token_ids", TOKENS))
    if is_scoring_generation(request):
        check_names(fields, repeated)
    return request


def _decoded(fields: Fields, list_name: str, forms: dict[str, Any]) -> dict[str, Any]:
    return {
        name: read_list(raw, name, forms) if name == list_name else read_anything(raw, name)
        for name, raw in fields.items()
    }


def _check_prompt(prompt: Any) -> None:
    match prompt:
        case [list(), *_]:
            named = [(f"prompt[{index}]", token_ids) for index, token_ids in enumerate(prompt)]
        case [int(), *_]:
            named = [("prompt", prompt)]
        case _:
            return
    for name, token_ids in named:
        if token_ids and min(token_ids) < 0:
            raise RequestError(f"{name} has the negative token id {min(token_ids)}", "prompt")
