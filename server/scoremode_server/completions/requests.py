"""Decides which requests to vLLM's routes score, and defines models of them whose validation stops at the first wrong
value."""

from typing import Annotated, Any

from pydantic import Field
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams

from scoremode.wire.protocol import PROMPT_FORMS, Many, one_message
from scoremode_server.errors import RequestError

_PROCESSORS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), (1,)),
    "top_k": (0, -1),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("bad_words", "logit_bias", "allowed_token_ids"), (None, [], {})),
    **dict.fromkeys(("structured_outputs", "thinking_token_budget"), (None,)),
}
"""The sampling parameters, other than temperature, that change vLLM's processed logprobs; each with its values that
change nothing."""

TokenIds = Many[Annotated[int, Field(ge=0)]]


class CompletionBody(CompletionRequest):
    """vLLM's model of a completion request, but with lists of any length as `prompt`."""

    prompt: Annotated[TokenIds | Many[TokenIds] | str | Many[str], one_message(PROMPT_FORMS)] | None = None


class GenerateBody(GenerateRequest):
    """vLLM's model of a request for token ids, but with any number of `token_ids`."""

    token_ids: Many[int] = Field(min_length=1)


def _num_top(request: CompletionRequest | ChatCompletionRequest, num_sampled: int | None) -> int | None:
    """How many top tokens a request wants for its prompt; None if it wants no logprobs for it. If the request sets only
    the number for the sampled token, `echo` applies it to the prompt too."""
    return num_sampled if request.prompt_logprobs is None and request.echo else request.prompt_logprobs


def is_scoring_completion(request: CompletionRequest) -> bool:
    """Whether a request wants the top k for its prompt and one choice, not streamed. vLLM answers all others."""
    num_top = _num_top(request, request.logprobs)
    return bool(
        num_top is not None
        and num_top >= 0
        and (request.logprobs is None or request.logprobs >= 0)
        # Without `echo`, vLLM refuses `max_tokens` of 0.
        and request.max_tokens in ((0, 1) if request.echo else (1,))
        and (request.n, request.prompt_embeds) == (1, None)
        and not (request.stream or request.use_beam_search or request.logprob_token_ids)
    )


def row_temperature(params: SamplingParams) -> float:
    """The temperature of a prompt's rows on a server with processed logprobs: the request's own, or 1 if that is 0, as
    in vLLM's sampler. RequestError if the request sets a parameter in `_PROCESSORS`."""
    for name, neutral in _PROCESSORS.items():
        if getattr(params, name) not in neutral:
            raise RequestError(
                f"{name}: this server (--logprobs-mode processed_logprobs) scores prompts with temperature alone; "
                f"leave out {name}",
                name,
            )
    return params.temperature or 1.0


def is_scoring_generation(request: GenerateRequest) -> bool:
    """Whether a request wants the top k for its prompt and one sampled token, not streamed. vLLM answers all others."""
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
    """Whether a request wants the top k for its conversation of texts and one sampled token, not streamed. vLLM answers
    all others."""
    num_top = _num_top(request, request.top_logprobs)
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return bool(
        num_top is not None
        and num_top >= 0
        and most == 1
        and not (request.stream or request.use_beam_search)
        and all(isinstance(message.get("content"), str | None) for message in request.messages)
    )
