"""Reading completion requests: benchmarks send prompts of thousands of token ids, by the thousand."""

from copy import copy
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils import random_uuid

from scoremode_server.errors import RequestError
from scoremode_server.json_fields import (
    PROMPTS,
    Fields,
    check_names,
    is_container,
    read_anything,
    read_list,
    split_as_vllm,
    stand_in,
)

Model = TypeVar("Model", bound=BaseModel)


def is_scoring(request: CompletionRequest) -> bool:
    """Whether a request wants logprobs of its prompt, all at once, from the top k: what is written from arrays.

    Streams, beam search, whole-vocabulary logprobs and chosen token ids stay vLLM's.
    """
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


Settings = tuple[tuple[str, bytes], ...]
"""Names of fields and the JSON of each."""

_MAX_REMEMBERED = 2048
"""Bytes of settings that are remembered."""

_MAX_MIXED = 65_536
"""Bytes of a list that vLLM's model is shown as it is: it takes a hundred times as long as decoding."""

_LISTS = [
    name
    for name, field in CompletionRequest.model_fields.items()
    if isinstance(field.get_default(call_default_factory=True), list)
]
"""Fields whose default is a list, of which each request has its own."""


class CompletionReader:
    """Reads bodies, and remembers settings that were valid: a benchmark's requests differ in their prompts only."""

    def __init__(self) -> None:
        self._remembered = lru_cache(maxsize=64)(_validated)

    def read(self, body: bytes) -> CompletionRequest:
        """The request that vLLM's model makes of a body.

        Pydantic would try each of a prompt's four forms on each token id. Here the prompt is decoded in the form that
        it has, and vLLM's model sees the other fields; docs/decisions.md has the time that it saves.

        Raises:
            RequestError: the body is no JSON object, the prompt has a wrong value, or one that scores repeats a field.
            ValidationError, VLLMValidationError: vLLM's model refuses another field.
        """
        fields, repeated = split_as_vllm(body)
        request = self._read(fields)
        if is_scoring(request):
            check_names(fields, repeated)
        return request

    def _read(self, fields: Fields) -> CompletionRequest:
        """Take the prompt out of the fields, and read all of them."""
        raw_prompt = fields.pop("prompt", None)
        settings = tuple((name, bytes(raw)) for name, raw in fields.items())
        if raw_prompt is None:
            return CompletionRequest.model_validate(_decoded(settings))
        try:
            prompt = read_list(raw_prompt, "prompt", PROMPTS)
            _check(prompt)
        except RequestError as error:
            return as_vllm_reads_it(CompletionRequest, _decoded(settings), "prompt", raw_prompt, error)
        short, count = _in_its_place(prompt)
        if not _may_be_remembered(fields):
            request = _validated(settings, short, count)
            request.prompt = prompt
            return request
        request = self._remembered(settings, short, count)
        own = {name: copy(getattr(request, name)) for name in _LISTS}
        if "request_id" not in fields:
            own["request_id"] = random_uuid()
        return request.model_copy(update={"prompt": prompt, **own})


def _check(prompt: Any) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise RequestError(
            "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
            "prompt",
        )
    if not prompt or isinstance(prompt[0], str):
        return
    several = isinstance(prompt[0], list)
    for index, token_ids in enumerate(prompt if several else [prompt]):
        if token_ids and min(token_ids) < 0:
            name = f"prompt[{index}]" if several else "prompt"
            raise RequestError(f"{name} has the negative token id {min(token_ids)}", "prompt")


def _in_its_place(prompt: Any) -> tuple[bytes, int]:
    """What vLLM's model validates instead of a prompt: as many prompts, whose number it checks, but short ones. JSON of
    one, or of a list with one, and how often that list is repeated."""
    short = stand_in(prompt)
    several = isinstance(short, list) and short and not isinstance(short[0], int)
    return msgspec.json.encode(short), len(prompt) if several else 1


def _validated(settings: Settings, short: bytes, count: int) -> CompletionRequest:
    prompt = msgspec.json.decode(short)
    return CompletionRequest.model_validate({**_decoded(settings), "prompt": prompt * count if count > 1 else prompt})


def _decoded(settings: Settings) -> dict[str, Any]:
    return {name: read_anything(msgspec.Raw(value), name) for name, value in settings}


def _may_be_remembered(fields: Fields) -> bool:
    """Whether settings are few and cannot be changed by who gets them."""
    num_bytes = sum(len(name) + len(raw) for name, raw in fields.items())
    return num_bytes <= _MAX_REMEMBERED and not any(map(is_container, fields.values()))


def as_vllm_reads_it(
    model: type[Model], others: dict[str, Any], field: str, raw: msgspec.Raw, error: RequestError
) -> Model:
    """The request, if vLLM's model takes a list of mixed values such as [5, 6.0], which it reads as token ids.

    Args:
        model: vLLM's.
        others: The values of all other fields.
        field: The name of the one that holds the list.
        raw: The list.
        error: Why it is no list of token ids.

    Raises:
        RequestError: vLLM's model does not take it: `error`; or the list is large.
        ValidationError: it refuses another field.
    """
    if len(raw) > _MAX_MIXED:
        raise error
    values = read_anything(raw, field)
    try:
        return model.model_validate({**others, field: values})
    except ValidationError as refused:
        # A fault of the whole request has no place.
        if any(field in detail["loc"][:1] for detail in refused.errors()):
            raise error from None
        raise
